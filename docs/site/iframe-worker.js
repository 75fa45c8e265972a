// Pages that are opened from a disk may not start workers, and the search runs in one: a hidden frame takes its place.
// The theme asks for window.IFrameWorker, and its worker script finds its own address in the frame.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = Object.assign(document.createElement("iframe"), { hidden: true, title: "search" });
      this.ready = new Promise((resolve, reject) => {
        const start = () => {
          document.body.append(frame);
          this.inner = frame.contentWindow;
          const page = this.inner.document;
          this.inner.postMessage = data => {
            const event = new MessageEvent("message", { data });
            this.dispatchEvent(event);
            this.onmessage?.(event);
          };
          this.inner.importScripts = (...urls) => urls.reduce((before, next) => before.then(() => load(next)), Promise.resolve());
          const load = address => new Promise((loaded, failed) => {
            const script = Object.assign(page.createElement("script"), { src: address, onload: loaded, onerror: failed });
            page.head.append(script);
          });
          load(String(url)).then(resolve, reject);
        };
        if (document.body) start();
        else addEventListener("DOMContentLoaded", start);
      });
    }

    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.inner?.frameElement.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
