// --- Data flow of a module: its modules and nodes as boxes, laid out level by level, only where it is open.

const SVG = "http://www.w3.org/2000/svg";
const LETTER = 6.7, LINE = 15, PADDING = 9, HEADER = 24;  // pixels, at a font size of 12
const LONGEST_LABEL = 34;
const MOST_READERS = 5, MOST_PORTS = 8;  // more would cover the graph with lines
const CLICK_PIXELS = 4;  // a pointer that moves further moves the graph
const MOST_OPEN = 1500;  // items that are opened by one click

function drawn(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Return a text without its middle if it is too long: names differ at their ends. */
function cutText(text, longest = LONGEST_LABEL) {
  const start = Math.ceil((longest - 1) / 2);
  return text.length > longest ? `${text.slice(0, start)}…${text.slice(start + 1 - longest)}` : text;
}

/** Return the lines of a closed box. */
function boxLines(item, note, mark) {
  const last = [note, mark].filter(Boolean);
  if (item.isPort) return [cutText(portLabel(item))];
  if (!item.isModule) {
    const weights = item.sources.map(source => originOf(item.module, source)).filter(origin => origin?.weight);
    const largest = weights.sort((left, right) => (right.bytes ?? 0) - (left.bytes ?? 0))[0];
    return [cutText(item.operator.replace(/^com\.microsoft\./, "")), ...(largest ? [cutText(largest.type)] : []), ...last];
  }
  const { nodes, parameters } = totalNumbers(item);
  const name = item.label.startsWith(item.className) || !item.className ? item.label : `${item.label}: ${item.className}`;
  const counts = [nodes ? countNoun(nodes, "node") : "", parameters ? `${countWords(parameters)} parameters` : ""].filter(Boolean).join(", ");
  return [cutText(name), ...(counts ? [counts] : []), ...last];
}

function boxSize(lines) {
  const longest = Math.max(...lines.map((line, index) => line.length + (index ? 0 : 2)));
  return { width: Math.max(60, longest * LETTER + 2 * PADDING), height: lines.length * LINE + PADDING };
}

/** Return the label of a port: the last part of the name of its tensor. */
const portLabel = ({ origin: { name } }) => name.split("/").at(-1) || name;

/** Return how many items read each source of a level: a port ("-1 n") or an item ("n"). */
function readersOf(items) {
  const readers = new Map();
  for (const item of items)
    for (const key of new Set(item.sources.map(([first, second]) => first === INPUT ? `${INPUT} ${second}` : String(first))))
      readers.set(key, (readers.get(key) ?? 0) + 1);
  return readers;
}

/** Return the items and tensors of one level: {items, edges, notes}; an edge lists the tensors between two items.
 *
 * A tensor with many readers, and each of many inputs and outputs, has no line: a note of the item counts them.
 */
function levelOf(module) {
  const inner = itemsOf(module), items = [...inner], edges = new Map(), ports = new Map(), notes = new Map();
  const readers = readersOf(inner), firstReaders = new Set();
  const [hasManyInputs, hasManyOutputs] = portsOf(module).map(tensors => tensors.length > MOST_PORTS);
  const connect = (from, to, origin) => {
    const key = `${items.indexOf(from)} ${items.indexOf(to)}`;
    if (!edges.has(key)) edges.set(key, { from, to, tensors: [] });
    const { tensors } = edges.get(key);
    if (!tensors.some(tensor => tensor.name === origin.name)) tensors.push(origin);
  };
  const portOf = (key, origin, isInput) => {
    if (!ports.has(key)) {
      ports.set(key, { isPort: true, isInput, origin, module });
      items.push(ports.get(key));
    }
    return ports.get(key);
  };
  const note = (item, kind, origin) => {
    if (!notes.has(item)) notes.set(item, { inputs: new Set(), outputs: new Set() });
    notes.get(item)[kind].add(origin.name);
  };
  for (const item of inner)
    for (const source of item.sources) {
      const origin = originOf(module, source), [first, second] = source;
      if (!origin || origin.weight) continue;
      const key = first === INPUT ? `${INPUT} ${second}` : String(first);
      const isShared = readers.get(key) > MOST_READERS && (first === INPUT || firstReaders.has(key));
      firstReaders.add(key);
      if (isShared || (first === INPUT && hasManyInputs)) note(item, "inputs", origin);
      else connect(first === INPUT ? portOf(key, origin, true) : inner[first], item, origin);
    }
  (module.template.o ?? []).forEach((source, number) => {
    const origin = originOf(module, source);
    if (!origin || source[0] < 0 || origin.weight) return;
    if (hasManyOutputs) note(inner[source[0]], "outputs", origin);
    else connect(inner[source[0]], portOf(`out ${number}`, origin, false), origin);
  });
  return { items, edges: [...edges.values()], notes };
}

/** Return the text on tensors of an item that have no lines. */
function noteWords({ inputs, outputs }) {
  const counts = [[inputs.size, "input"], [outputs.size, "output"]].filter(([count]) => count);
  return `+ ${counts.map(([count, noun]) => countNoun(count, noun)).join(", ")}`;
}

/** Return the label of an edge: the type of its tensor, or how many tensors there are. */
function edgeLabel({ tensors }) {
  return tensors.length > 1 ? `${tensors.length} tensors` : cutText(tensors[0].type.replace(/, /g, "×").replace(/^(\w+)\[/, "$1["), 30);
}

/** Lay out a module: size of its inside, and the places of its items; open items are laid out first. */
function layOutModule(module, isOpen, cache, markOf) {
  const key = module.children.filter(isOpen).map(child => layOutModule(child, isOpen, cache, markOf).key).join(",");
  const kept = cache.get(module);
  if (kept && kept.inner === key) return kept;
  const { items, edges, notes } = levelOf(module), graph = new dagre.graphlib.Graph();
  graph.setGraph({ rankdir: "TB", nodesep: 16, ranksep: 26, edgesep: 8, marginx: 10, marginy: 10 });
  const boxes = items.map((item, index) => {
    const inner = item.isModule && isOpen(item) ? layOutModule(item, isOpen, cache, markOf) : null;
    const lines = boxLines(item, notes.has(item) ? noteWords(notes.get(item)) : "", item.isPort ? "" : markOf(item)), closed = boxSize(lines);
    const size = inner ? { width: Math.max(inner.width, closed.width + 20), height: inner.height + HEADER } : closed;
    graph.setNode(String(index), { ...size });
    return { item, inner, lines, ...size };
  });
  const labelled = edges.length <= 80;
  for (const edge of edges) {
    const label = labelled ? edgeLabel(edge) : "";
    graph.setEdge(String(items.indexOf(edge.from)), String(items.indexOf(edge.to)), { width: label.length * 5.4, height: label ? 12 : 0, labelpos: "c" });
  }
  dagre.layout(graph);
  boxes.forEach((box, index) => {
    const { x, y } = graph.node(String(index));
    Object.assign(box, { x: x - box.width / 2, y: y - box.height / 2 });
  });
  const lines = edges.map(edge => {
    const { points, x, y } = graph.edge(String(items.indexOf(edge.from)), String(items.indexOf(edge.to)));
    return { ...edge, points, x, y, label: labelled ? edgeLabel(edge) : "" };
  });
  const { width = 100, height = 40 } = graph.graph();
  const layout = { module, boxes, lines, inner: key, key: `${module.index}(${key})`, width: Math.max(width, 80), height: Math.max(height, 30) };
  cache.set(module, layout);
  return layout;
}

/** Return the path of a line through points, with rounded corners. */
function roundedPath(points) {
  if (points.length < 3) return `M${points.map(({ x, y }) => `${x},${y}`).join("L")}`;
  const middle = (a, b) => `${(a.x + b.x) / 2},${(a.y + b.y) / 2}`;
  const inner = points.slice(1, -1).map((point, index) => `Q${point.x},${point.y} ${middle(point, points[index + 2])}`);
  return `M${points[0].x},${points[0].y}L${middle(points[0], points[1])}${inner.join("")}L${points.at(-1).x},${points.at(-1).y}`;
}

/** Show the data flow of modules in an element of the page.
 *
 * @param frame element with .flow, .path and buttons.
 * @param events onSelect(item), onTensors(tensors), onEnter(module), onToggle(module, isOpen), onTool(name),
 *   colourOf(module) → CSS colour or "", markOf(item) → text or "".
 */
function showGraph(frame, root, events) {
  const flow = frame.querySelector(".flow"), path = frame.querySelector(".path");
  let top = root, open = new Set(), selected = null, scale = 1, shapes = new Map(), layout = null, isMovingFocus = false;
  const cache = new Map();
  const isOpen = module => open.has(module);

  function draw() {
    layout = layOutModule(top, isOpen, cache, events.markOf);
    shapes = new Map();
    const marker = drawn("marker", { id: `arrow-${frame.id}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
      drawn("path", { d: "M0,0L8,4L0,8z", class: "arrow" }));
    const image = drawn("svg", { viewBox: `0 0 ${layout.width} ${layout.height}`, role: "group", "aria-label": `Graph of ${top.label}` },
      drawn("defs", {}, marker), levelShape(layout));
    flow.replaceChildren(image);
    resize();
    path.replaceChildren(...lineage(top).flatMap((module, place, all) =>
      place === all.length - 1 ? [element("b", "", module.label)] : [button("", module.label, () => enter(module)), " › "]));
    if (selected && !shapes.has(selected)) selected = null;
    if (!selected) setFocusable(layout.boxes[0]?.item);
    else mark(selected);
  }

  function levelShape({ boxes, lines }) {
    const group = drawn("g", {});
    for (const line of lines) {
      const title = drawn("title", {}, line.tensors.map(({ name, type }) => `${name} ${type}`).join("\n"));
      const shape = drawn("g", { class: "tensor" },
        drawn("path", { d: roundedPath(line.points), "marker-end": `url(#arrow-${frame.id})` }),
        ...(line.label ? [drawn("text", { x: line.x, y: line.y + 3, "text-anchor": "middle" }, line.label)] : []), title);
      shape.addEventListener("click", event => { event.stopPropagation(); events.onTensors(line.tensors); });
      group.append(shape);
    }
    for (const box of boxes) group.append(boxShape(box));
    return group;
  }

  function boxShape({ item, inner, lines, x, y, width, height }) {
    const kind = item.isPort ? "port" : item.isModule ? `module${inner ? " open" : ""}` : "node";
    const mark = item.isPort ? "" : events.markOf(item);
    const shape = drawn("g", {
      class: `box ${kind}${mark ? " changed" : ""}`, transform: `translate(${x},${y})`, tabindex: -1, role: "button",
      "aria-label": lines.join(", "),
    });
    if (item.isModule) shape.setAttribute("aria-expanded", !!inner);
    shape.append(drawn("rect", { width, height, rx: item.isPort ? height / 2 : 4 }));
    paint(item, shape);
    const texts = inner ? [mark ? `${lines[0]} · ${mark}` : lines[0]] : lines;
    const sign = item.isModule ? inner ? "▾ " : "▸ " : "";
    texts.forEach((text, index) => shape.append(drawn("text", {
      x: inner ? PADDING : width / 2, y: (inner ? 16 : PADDING / 2 + 11.5) + index * LINE,
      "text-anchor": inner ? "start" : "middle", class: index && index === texts.length - 1 && mark ? "mark" : index ? "dim" : "",
    }, (index ? "" : sign) + text)));
    shape.append(drawn("title", {}, item.isPort ? `${item.origin.name} ${item.origin.type}` : item.isModule ? item.path || item.label : item.name));
    if (inner) {
      const inside = levelShape(inner);
      inside.setAttribute("transform", `translate(${(width - inner.width) / 2},${HEADER})`);
      shape.append(inside);
    }
    shape.addEventListener("click", event => { event.stopPropagation(); shape.focus({ preventScroll: true }); choose(item); if (item.isModule && event.detail !== 2) toggle(item); });
    shape.addEventListener("dblclick", event => { event.stopPropagation(); if (item.isModule) enter(item); });
    shape.addEventListener("focus", event => { if (event.target === shape && selected !== item && !isMovingFocus) choose(item); });
    shapes.set(item, shape);
    return shape;
  }

  function paint(item, shape) {
    if (item.isModule) shape.firstElementChild.style.fill = events.colourOf(item);
  }

  function setFocusable(item) {
    for (const shape of shapes.values()) shape.setAttribute("tabindex", -1);
    shapes.get(item)?.setAttribute("tabindex", 0);
  }

  /** Focus the box that the Tab key reaches; what is described stays. */
  function moveFocus(options) {
    isMovingFocus = true;
    flow.querySelector('[tabindex="0"]')?.focus(options);
    isMovingFocus = false;
  }

  function mark(item) {
    for (const [other, shape] of shapes) shape.classList.toggle("selected", other === item);
    setFocusable(item);
  }

  function choose(item) {
    selected = item;
    mark(item);
    events.onSelect(item);
  }

  /** Open or close a module; its box stays where it is in the window. */
  function setOpen(module, isNowOpen) {
    if (!itemsOf(module).length || open.has(module) === isNowOpen || !shapes.has(module)) return;
    const placeOf = () => shapes.get(module).getBoundingClientRect(), before = placeOf();
    if (isNowOpen) open.add(module);
    else open.delete(module);
    const hadFocus = flow.contains(document.activeElement);
    draw();
    const after = placeOf();
    flow.scrollBy(after.left - before.left + Math.min(0, (before.width - after.width) / 2), after.top - before.top);
    if (hadFocus) shapes.get(module).focus({ preventScroll: true });
  }

  function toggle(module) {
    const isNowOpen = !open.has(module);
    setOpen(module, isNowOpen);
    events.onToggle(module, isNowOpen);
  }

  /** Show the inside of a module. */
  function enter(module, isQuiet = false) {
    if (!itemsOf(module).length && module.parent) module = module.parent;
    const hadFocus = flow.contains(document.activeElement), inner = lineage(top).find(({ parent }) => parent === module);
    top = module;
    open = new Set();
    selected = null;
    draw();
    fitWidth();
    if (hadFocus) {
      if (inner) setFocusable(inner);
      moveFocus({ preventScroll: !inner });
    }
    if (!isQuiet) events.onEnter(module);
  }

  function resize() {
    const image = flow.firstElementChild;
    image.setAttribute("width", layout.width * scale);
    image.setAttribute("height", layout.height * scale);
  }

  function zoomBy(factor) {
    const [x, y] = [flow.scrollLeft + flow.clientWidth / 2, flow.scrollTop + flow.clientHeight / 2];
    const next = Math.min(3, Math.max(Math.min(scale, 0.1), scale * factor)), ratio = next / scale;  // fit may be below 0.1
    scale = next;
    resize();
    flow.scrollTo(x * ratio - flow.clientWidth / 2, y * ratio - flow.clientHeight / 2);
  }

  /** Show the top of the graph, as wide as the frame unless it would be too small to read. */
  function fitWidth() {
    scale = Math.min(1, Math.max(0.5, flow.clientWidth / layout.width));
    resize();
    flow.scrollTo(Math.max(0, (flow.scrollWidth - flow.clientWidth) / 2), 0);
  }

  function fit() {
    scale = Math.min(1, flow.clientWidth / layout.width, 0.7 * innerHeight / layout.height);
    resize();
  }

  /** Open the modules of the next level, as long as they have few items. */
  function openNext() {
    const closed = layout.boxes.flatMap(function inside(box) {
      return box.inner ? box.inner.boxes.flatMap(inside) : box.item.isModule && itemsOf(box.item).length ? [box.item] : [];
    });
    let count = 0;
    for (const module of closed) {
      count += itemsOf(module).length;
      if (count > MOST_OPEN) break;
      open.add(module);
    }
    draw();
    fitWidth();
  }

  /** Return the item that a key moves to: along the data flow, or to the nearest box on the same side. */
  function neighbour(item, key) {
    const home = item.isModule ? item.parent : item.module;
    const level = home && cache.get(home);
    if (!level) return null;
    const lineTo = { ArrowDown: ["from", "to"], ArrowUp: ["to", "from"] }[key];
    if (lineTo) return level.lines.find(line => line[lineTo[0]] === item)?.[lineTo[1]];
    const box = level.boxes.find(other => other.item === item), sign = { ArrowLeft: -1, ArrowRight: 1 }[key];
    const beside = level.boxes.filter(other => sign * (other.x - box.x) > 0);
    const distance = other => Math.abs(other.x - box.x) + 4 * Math.abs(other.y - box.y);
    return beside.sort((left, right) => distance(left) - distance(right))[0]?.item;
  }

  flow.addEventListener("keydown", event => {
    const item = [...shapes].find(([, shape]) => shape === document.activeElement)?.[0];
    if (!item) return;
    if (event.key.startsWith("Arrow")) {
      event.preventDefault();
      shapes.get(neighbour(item, event.key))?.focus();
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      if (item.isModule && event.key === "Enter") toggle(item);
      else choose(item);
    } else if (event.key === "Escape" && top.parent) {
      event.preventDefault();
      enter(top.parent);
    } else if (event.key === "+" || event.key === "-") useTool(event.key === "+" ? "in" : "out");
  });
  flow.addEventListener("wheel", event => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    zoomBy(event.deltaY < 0 ? 1.15 : 0.87);
  }, { passive: false });
  flow.addEventListener("pointerdown", event => {
    if (event.button || event.pointerType !== "mouse") return;  // a finger scrolls
    const { clientX, clientY } = event, { scrollLeft, scrollTop } = flow;
    let isMoved = false;
    const move = ({ clientX: x, clientY: y }) => {
      isMoved ||= Math.hypot(x - clientX, y - clientY) > CLICK_PIXELS;
      if (isMoved) flow.scrollTo(scrollLeft + clientX - x, scrollTop + clientY - y);
      flow.classList.toggle("moving", isMoved);
    };
    const swallow = click => { click.stopPropagation(); click.preventDefault(); };
    addEventListener("pointermove", move);
    addEventListener("pointerup", () => {
      removeEventListener("pointermove", move);
      flow.classList.remove("moving");
      if (!isMoved) return;
      flow.addEventListener("click", swallow, { capture: true });
      setTimeout(() => flow.removeEventListener("click", swallow, { capture: true }));
    }, { once: true });
  });

  const tools = {
    in: () => zoomBy(1.25), out: () => zoomBy(0.8), fit, deeper: openNext,
    closed: () => { open = new Set(); draw(); fitWidth(); },
  };
  function useTool(name) {
    tools[name]();
    events.onTool(name);
  }
  for (const name of Object.keys(tools)) frame.querySelector(`.${name}`).addEventListener("click", () => useTool(name));

  enter(top, true);
  return {
    setOpen,
    enter: module => enter(module, true),
    use: name => tools[name](),
    repaint: () => shapes.forEach((shape, item) => paint(item, shape)),
    /** Show an item inside its module, selected, without an event. */
    reveal: item => {
      const home = item.isModule ? item.parent ?? item : item.module;
      enter(home, true);
      if (!shapes.has(item)) return;
      selected = item;
      mark(item);
      shapes.get(item).scrollIntoView({ block: "center", inline: "center" });
    },
    focus: () => moveFocus({ preventScroll: true }),
  };
}
