"use strict";

// --- Tables: a click on a head sorts; the rows of one are filtered and compared.

const numberOf = cell => cell.dataset.value === undefined ? NaN : Number(cell.dataset.value);

for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  for (const row of body.rows)
    for (const cell of row.cells) cell.dataset.label = heads[cell.cellIndex].textContent;
  heads.forEach((head, column) => head.firstElementChild?.addEventListener("click", () => {
    const isNumber = head.classList.contains("number");
    const wasDescending = head.getAttribute("aria-sort") === "descending";
    const isDescending = head.hasAttribute("aria-sort") ? !wasDescending : isNumber;
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", isDescending ? "descending" : "ascending");
    const sign = isDescending ? -1 : 1;
    table.dataset.sorted = "";
    body.append(...[...body.rows].sort((left, right) => {
      const [a, b] = [left.cells[column], right.cells[column]];
      if (!isNumber) return sign * a.textContent.localeCompare(b.textContent, "en", { numeric: true });
      const [x, y] = [numberOf(a), numberOf(b)];
      return Number.isNaN(x) - Number.isNaN(y) || sign * (x - y);  // what was not measured comes last
    }));
    showFolds(table);
  }));
  for (const row of body.querySelectorAll("tr[data-place=head]")) {
    const opener = document.createElement("button");
    opener.type = "button";
    opener.className = "opener";
    opener.addEventListener("click", () => {
      row.toggleAttribute("data-open");
      showFolds(table);
    });
    row.querySelector(".title").prepend(opener);
  }
  showFolds(table);
}

/** Show each fold of a table open or closed; a sorted or filtered table has no folds. */
function showFolds(table) {
  const isFiltered = !!table.closest(".scroll").previousElementSibling?.matches("form.filter") && filterWords().length > 0;
  const isFlat = isFiltered || "sorted" in table.dataset;
  const open = new Set([...table.querySelectorAll("tr[data-open]")].map(row => row.dataset.fold));
  for (const row of table.querySelectorAll("tr[data-fold]")) {
    const { fold, place } = row.dataset, isOpen = open.has(fold);
    if (!place) row.classList.toggle("folded", !isFlat && !isOpen);
    else row.hidden = isFlat || (place === "inner" && isOpen);
    const opener = row.querySelector(".opener");
    if (opener) {
      opener.textContent = isOpen ? "▾ " : "▸ ";
      opener.setAttribute("aria-expanded", isOpen);
    }
  }
}

function filterWords() {
  return (document.getElementById("filter")?.value ?? "").toLowerCase().split(/\s+/).filter(Boolean);
}

const form = document.querySelector("form.filter");
const rows = [...form?.nextElementSibling.firstElementChild.tBodies[0].rows ?? []].filter(row => !row.dataset.place);
const filter = document.getElementById("filter"), choices = document.querySelectorAll(".choice");
const reference = document.getElementById("reference");

function select() {
  const words = filterWords();
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every(word => text.includes(word))
      || [...choices].some(choice => choice.value !== "" && row.cells[choice.dataset.column].textContent !== choice.value);
  }
  showFolds(form.nextElementSibling.firstElementChild);
  document.getElementById("count").textContent = `${rows.filter(row => !row.hidden).length} of ${rows.length} rows`;
}

function compare() {
  const chosen = reference.value, isEarlier = chosen === EARLIER;
  const base = new Map(rows.filter(row => row.dataset.variant === chosen).map(row => [row.dataset.item, row]));
  for (const row of rows)
    for (const cell of row.querySelectorAll("td.number")) {
      cell.querySelector("small")?.remove();
      const other = isEarlier ? cell.dataset.earlier : base.get(row.dataset.item)?.cells[cell.cellIndex].dataset.value;
      if (!chosen || other === undefined || cell.dataset.value === undefined || base.get(row.dataset.item) === row) continue;
      const ratio = numberOf(cell) / Number(other), words = document.createElement("small");
      words.textContent = Number.isFinite(ratio) && Number(other) !== 0 ? `× ${ratio.toPrecision(3)}` : `was ${other}`;
      cell.append(words);
    }
}

form?.addEventListener("submit", event => event.preventDefault());
filter?.addEventListener("input", select);
for (const choice of choices) choice.addEventListener("change", select);
reference?.addEventListener("change", compare);
if (form) select();

addEventListener("beforeprint", () => { for (const details of document.querySelectorAll("details")) details.open = true; });

// --- Modules as boxes inside boxes. One of them is at the top, as wide as the chart; those inside it lie below it.

const COLOURS = 8;  // of classes; all others share a grey
const ROW_REM = 2.8, LEAST_WIDTH = 0.0015, LEAST_LABEL = 0.02;  // a box below the least width is not drawn

function element(name, className, text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}

/** Return the outermost module of a chart; one without a name where there are several. */
function treeOf(data) {
  const nodes = data.boxes.map(([parent, label, kind, words, size, shade, isMarked, lines]) =>
    ({ parent, label, kind, words, own: size, shade, isMarked: !!isMarked, lines, count: 1, children: [] }));
  const roots = nodes.filter(node => node.parent < 0);
  for (const node of nodes) if (node.parent >= 0) nodes[node.parent].children.push(node);
  return roots.length === 1 ? roots[0]
    : { label: "all", kind: "", words: "", own: 0, shade: null, isMarked: false, lines: [], count: 1, children: roots };
}

/** Set what a module and those inside it add up to, and what tells equal modules from others. */
function measure(node) {
  node.children.forEach(measure);
  node.total = node.children.reduce((sum, child) => sum + child.total, node.own);
  node.likeness = `${node.kind || node.label.replace(/\.?\d+$/, "")}(${node.children.map(child => child.likeness)})`;
  node.hasMark = node.isMarked || node.children.some(child => child.hasMark);
  return node;
}

const sizeOf = node => node.children.reduce((sum, child) => sum + sizeOf(child), 1);

/** Return the smallest and the largest shade of a module and those inside it. */
function endsOf(node) {
  const inside = node.children.map(endsOf), own = node.shade === null ? [] : [node.shade];
  return [Math.min(...own, ...inside.map(([low]) => low)), Math.max(...own, ...inside.map(([, high]) => high))];
}

/** Return a module in which equal neighbours are one. */
function folded(node, merge) {
  const groups = [];
  for (const child of node.children) {
    const last = groups.at(-1);
    if (last && !child.hasMark && !last[0].hasMark && last[0].likeness === child.likeness) last.push(child);
    else groups.push([child]);
  }
  return { ...node, children: groups.map(group => folded(group.length > 1 ? joined(group, merge) : group[0], merge)) };
}

function joined(group, merge) {
  const [first, last] = [group[0], group.at(-1)], shades = group.map(node => node.shade).filter(value => value !== null);
  const suffix = last.label.match(/\.[^.]*$/)?.[0] ?? "";
  const label = first.label === last.label ? first.label : suffix ? `${first.label} … ${suffix}` : `${first.label} … ${last.label}`;
  return {
    ...first, label, words: group.every(node => node.words === first.words) ? first.words : "", own: group.reduce((sum, node) => sum + node.own, 0),
    total: group.reduce((sum, node) => sum + node.total, 0),
    shade: shades.length ? shades.reduce((left, right) => merge(left, right)) : null,
    count: group.reduce((sum, node) => sum + node.count, 0),
    lines: [group[0].lines[0] === last.lines[0] ? first.lines[0] : `${first.lines[0]} … ${last.lines[0]}`],
    search: first.lines[0],
    children: first.children.map((_, place) => joined(group.map(node => node.children[place]), merge)),
  };
}

/** Return the position of a value between the ends of a colour scale, from 0 to 1. */
function partOf(value, { logarithmic }, [low, high]) {
  const at = logarithmic ? value => Math.log10(Math.max(value, low)) : value => value;
  return at(high) > at(low) ? (at(Math.min(Math.max(value, low), high)) - at(low)) / (at(high) - at(low)) : 0;
}

function showBoxes(chart, data, classes) {
  const plot = chart.querySelector(".plot"), path = chart.querySelector(".path"), about = chart.querySelector("output");
  const toRows = chart.querySelector(".rows"), legend = chart.querySelector(".legend");
  const fold = chart.querySelector(".fold"), colour = chart.querySelector(".colour");
  const merge = { sum: (a, b) => a + b, max: Math.max, min: Math.min }[data.shades?.folded ?? "sum"];
  const whole = measure(treeOf(data)), brief = measure(folded(whole, merge));
  const canFold = sizeOf(brief) < sizeOf(whole);
  let top = canFold ? brief : whole, parents = new Map(), selected = top, buttons = new Map();

  const amount = value => `${Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : Number(value.toPrecision(3))} ${data.unit}`.trim();
  const written = value => Math.abs(value) > 1e300 ? "∞" : value && Math.abs(value) < 0.01 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
  const words = node => node.words || (node.count > 1 && node.shade !== null && data.shades && data.shades.folded !== "sum"
    ? `${data.shades.folded === "max" ? "largest" : "lowest"} ${written(node.shade)}` : `${amount(node.total)}, ${share(node)}`);
  const share = node => whole.total ? `${(100 * node.total / whole.total).toFixed(1)} %` : "";
  const root = () => canFold && fold.checked ? brief : whole;
  const name = node => node.count > 1 ? `${node.label} (${node.count} ×)` : node.label;
  const byClass = () => colour.value === "class";
  const ends = () => {
    const { low, high, limit } = data.shades, found = endsOf(root());
    if (limit !== null) found.splice(0, 2, Math.min(found[0], limit), Math.max(found[1], limit));
    return [low ?? (Number.isFinite(found[0]) ? found[0] : 0), high ?? (Number.isFinite(found[1]) ? found[1] : 1)];
  };

  function place(node) {  // from 0 to 1: how dark
    if (node.shade === null) return 0;
    const part = partOf(node.shade, data.shades, ends());
    return data.shades.darkLow ? 1 - part : part;
  }

  function describe(node) {
    const lines = node.lines.length && node.count === 1 ? node.lines
      : [node.lines[0] ?? node.label, `${node.count} equal modules`, `${data.sizeTitle} ${amount(node.total)} together`];
    const shade = node.count > 1 && data.shades && node.shade !== null && data.shades.folded !== "sum"
      ? [`${data.shades.folded === "max" ? "largest" : "lowest"} ${data.shades.title}: ${written(node.shade)}`] : [];
    about.textContent = [...lines, ...shade, ...(node.kind ? [`${data.kindTitle} ${node.kind}`] : []), `${share(node)} of the width`].join(" · ");
    toRows.hidden = !filter || !selected.lines.length;
  }

  function draw() {
    const boxes = [];
    parents = new Map();
    const known = (node, parent) => { parents.set(node, parent); for (const child of node.children) known(child, node); };
    known(root(), null);
    const lay = (node, left, level) => {
      const width = top.total ? node.total / top.total : 0;
      if (level && width < LEAST_WIDTH) return;
      boxes.push([node, left, width, level]);
      let next = left;
      for (const child of node.children) { lay(child, next, level + 1); next += top.total ? child.total / top.total : 0; }
    };
    lay(top, 0, 0);
    if (!boxes.some(([node]) => node === selected)) selected = top;
    buttons = new Map();
    plot.replaceChildren(...boxes.map(([node, left, width, level]) => {
      const box = element("button");
      box.type = "button";
      box.style.cssText = `left:${100 * left}%;width:${100 * width}%;top:${level * ROW_REM}rem`;
      if (width >= LEAST_LABEL) {
        box.append(element("span", "", (node.isMarked ? "▶ " : "") + name(node)));
        box.append(element("span", "", words(node)));
      } else box.style.padding = "0";
      if (byClass() || !data.shades || node.shade === null) box.style.background = `var(--c${byClass() ? classes.get(node.kind) ?? COLOURS : COLOURS})`;
      else { box.classList.add("heat"); box.style.setProperty("--heat", `${100 * place(node)}%`); }
      box.classList.toggle("marked", node.isMarked);
      box.setAttribute("role", "treeitem");
      box.setAttribute("aria-level", level + 1);
      box.setAttribute("aria-label", `${name(node)}, ${words(node)}`);
      box.tabIndex = node === selected ? 0 : -1;
      box.addEventListener("click", () => zoom(node === top ? parents.get(node) ?? node : node));
      box.addEventListener("focus", () => reach(node));
      box.addEventListener("pointerenter", () => describe(node));
      buttons.set(node, box);
      return box;
    }));
    plot.style.height = `${ROW_REM * (1 + Math.max(...boxes.map(([, , , level]) => level)))}rem`;
    const around = [];
    for (let node = top; node; node = parents.get(node)) around.unshift(node);
    path.replaceChildren(...around.flatMap((node, place) => {
      if (place === around.length - 1) return [element("b", "", name(node))];
      const step = element("button", "", name(node));
      step.type = "button";
      step.addEventListener("click", () => zoom(node));
      return [step, " › "];
    }));
    describe(selected);
    drawLegend(legend, byClass() ? classes : new Map());
    if (!byClass() && data.shades) drawRamp(legend, data.shades, ends());
  }

  function reach(node) {
    const before = buttons.get(selected);
    if (before) before.tabIndex = -1;
    for (const box of buttons.values()) box.tabIndex = -1;
    buttons.get(node).tabIndex = 0;
    selected = node;
    describe(node);
  }

  function zoom(node) {
    const hadFocus = plot.contains(document.activeElement);
    top = selected = node;
    draw();
    if (hadFocus) buttons.get(node).focus();
  }

  plot.addEventListener("keydown", event => {
    const node = [...buttons].find(([, box]) => box === document.activeElement)?.[0];
    if (!node) return;
    if (event.key === "Escape" && parents.get(top)) { event.preventDefault(); zoom(parents.get(top)); return; }
    const siblings = node === top ? [node] : parents.get(node).children.filter(child => buttons.has(child));
    const next = {
      ArrowDown: () => node.children.find(child => buttons.has(child)),
      ArrowUp: () => node === top ? null : parents.get(node),
      ArrowLeft: () => siblings[siblings.indexOf(node) - 1],
      ArrowRight: () => siblings[siblings.indexOf(node) + 1],
      Home: () => top,
    }[event.key];
    if (!next) return;
    event.preventDefault();
    const found = next();
    if (found) buttons.get(found).focus();
  });
  fold.addEventListener("change", () => { top = selected = root(); draw(); });
  colour.addEventListener("change", draw);
  toRows.addEventListener("click", () => {
    filter.value = selected.search ?? selected.lines[0];
    select();
    filter.scrollIntoView({ block: "start" });
    filter.focus({ preventScroll: true });
  });
  plot.addEventListener("pointerleave", () => describe(selected));

  const ways = [...(classes.size > 1 ? [["class", `by ${data.kindTitle}`]] : []), ...(data.shades ? [["shade", `by ${data.shades.title}`]] : [])];
  colour.append(...ways.map(([value, words]) => Object.assign(element("option", "", words), { value })));
  colour.value = classes.size > 1 && data.byClass ? "class" : ways.at(-1)?.[0] ?? "";
  colour.parentElement.hidden = ways.length < 2;
  fold.parentElement.hidden = !canFold;
  draw();
}

/** Return class → number of its colour in all charts of the page, those with most of the charts first. */
function classColours(charts) {
  const sums = new Map();
  for (const { boxes } of charts) {
    const whole = boxes.reduce((sum, [, , , , size]) => sum + size, 0) || 1;
    for (const [, , kind, , size] of boxes) if (kind) sums.set(kind, (sums.get(kind) ?? 0) + size / whole);
  }
  const names = [...sums].sort((left, right) => right[1] - left[1]).map(([kind]) => kind);
  return new Map(names.map((kind, place) => [kind, Math.min(place, COLOURS)]));
}

function drawLegend(legend, classes) {
  const swatch = (style, words) => {
    const entry = element("span"), sign = element("i");
    sign.style.background = `var(--c${style})`;
    entry.append(sign, words);
    return entry;
  };
  const named = [...classes].filter(([, place]) => place < COLOURS), others = classes.size - named.length;
  const rest = others ? [swatch(COLOURS, `others (${others})`)] : [];
  legend.replaceChildren(...named.map(([kind, place]) => swatch(place, kind)), ...rest);
}

function drawRamp(legend, shades, ends) {
  const [low, high] = ends.map(value => Math.abs(value) < 0.01 && value ? value.toExponential(0) : String(Number(value.toPrecision(3))));
  const ramp = element("i", shades.darkLow ? "ramp reversed" : "ramp");
  if (shades.limit !== null) ramp.append(Object.assign(element("u"), { style: `left:${100 * partOf(shades.limit, shades, ends)}%` }));
  legend.replaceChildren(`${shades.title}: ${low} `, ramp, high, ...(shades.limit === null ? [] : [` ▏${shades.limitWords}`]));
}

const charts = new Map([...document.querySelectorAll(".boxes")].map(chart => [chart, JSON.parse(chart.querySelector("script").textContent)]));
const colours = classColours([...charts.values()]);
for (const [chart, data] of charts) {
  const kinds = new Set(data.boxes.map(([, , kind]) => kind));
  showBoxes(chart, data, new Map([...colours].filter(([kind]) => kinds.has(kind))));
}
