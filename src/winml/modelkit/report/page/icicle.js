// --- Modules as boxes inside boxes. One of them is at the top, as wide as the chart; those inside it lie below it.
//
// A node has: label, kinds (text by category), foldedBy (texts that folded modules share; without it, all kinds), sizes
// and shades (number or null by measure), lines, words, isMarked, children. Measures: title, unit, write (number → text); shades also: folded, logarithmic, darkLow, low, high, limit.

const COLOURS = 8;  // of classes; all others share a grey
const NEUTRAL = "equal";  // a kind in grey
const SEVERAL = "several";  // the kind of folded modules of different kinds
const MOST_LETTERS = 60;  // of a kind in the legend; its tooltip has all
const ROW_REM = 2.8, LEAST_WIDTH = 0.0015, LEAST_LABEL = 0.02;  // a box below the least width is not drawn
const MERGES = { sum: (a, b) => a + b, max: (a, b) => Math.max(a, b), min: (a, b) => Math.min(a, b) };

/** Set the totals of a module and the modules inside it, and the text by which equal modules are recognized. */
function measure(node) {
  node.children.forEach(measure);
  node.totals = node.sizes.map((own, index) =>
    node.children.reduce((sum, child) => sum === null || child.totals[index] === null ? null : sum + child.totals[index], own));
  // The number of a layer in the path of a fused module does not distinguish layers.
  const others = (node.foldedBy ?? node.kinds.slice(1)).map(kind => kind.replace(/(?<=^|[./])\d+(?=$|[./,])/g, "*"));
  node.likeness = `${[node.kinds[0] || node.label.replace(/\.?\d+$/, ""), ...others].join("|")}(${node.children.map(child => child.likeness)})`;
  node.hasMark = node.isMarked || node.children.some(child => child.hasMark);
  return node;
}

const sizeOf = node => node.children.reduce((sum, child) => sum + sizeOf(child), 1);

/** Return the values of a shade in a module and the modules inside it. */
const shadesIn = (node, index) => [node.shades[index], ...node.children.flatMap(child => shadesIn(child, index))].filter(value => value !== null);

/** Return a module in which equal neighbours are one. */
function folded(node, shades) {
  const groups = [];
  for (const child of node.children) {
    const last = groups.at(-1);
    if (last && !child.hasMark && !last[0].hasMark && last[0].likeness === child.likeness) last.push(child);
    else groups.push([child]);
  }
  return { ...node, children: groups.map(group => folded(group.length > 1 ? joined(group, shades) : group[0], shades)) };
}

/** Return the node that stands for equal modules, with the spread of their numbers. */
function joined(group, shades) {
  const [first, last] = [group[0], group.at(-1)];
  const suffix = last.label.match(/\.[^.]*$/)?.[0] ?? "";
  const label = first.label === last.label ? first.label : suffix ? `${first.label} … ${suffix}` : `${first.label} … ${last.label}`;
  const spread = (old, values) => old ?? (values.length ? [Math.min(...values), Math.max(...values)] : null);
  const valuesOf = (key, index) => group.map(node => node[key][index]).filter(value => value !== null);
  return {
    ...first, label, members: group.flatMap(node => node.members ?? [node]),
    words: group.every(node => node.words === first.words) ? first.words : "",
    kinds: first.kinds.map((kind, index) => group.every(node => node.kinds[index] === kind) ? kind : SEVERAL),
    sizes: first.sizes.map((_, index) => group.some(node => node.sizes[index] === null) ? null : valuesOf("sizes", index).reduce((a, b) => a + b, 0)),
    shades: first.shades.map((_, index) => {
      const values = valuesOf("shades", index);
      return values.length ? values.reduce((a, b) => MERGES[shades[index].folded](a, b)) : null;
    }),
    sizeSpread: first.totals.map((_, index) => spread(null, group.flatMap(node => node.sizeSpread?.[index] ?? valuesOf("totals", index)))),
    shadeSpread: first.shades.map((_, index) => spread(null, group.flatMap(node => node.shadeSpread?.[index] ?? valuesOf("shades", index)))),
    lines: [group[0].lines[0] === last.lines[0] ? first.lines[0] : `${first.lines[0]} … ${last.lines[0]}`],
    search: first.lines[0],
    children: first.children.map((_, place) => joined(group.map(node => node.children[place]), shades)),
  };
}

/** Return the position of a value between the ends of a colour scale, from 0 to 1; 0 if both ends are equal. */
function partOf(value, { logarithmic }, [low, high]) {
  const at = logarithmic ? Math.log10 : value => value;
  return high > low ? (at(Math.min(Math.max(value, low), high)) - at(low)) / (at(high) - at(low)) : 0;
}

/** Return the ends of the colour scale of a shade: of finite values, and of positive ones if it is logarithmic. */
function scaleOf(values, shade) {
  const { low = null, high = null, limit = null } = shade;
  const fits = value => Math.abs(value) < INFINITE && (value > 0 || !shade.logarithmic);
  const found = [...values, ...(limit === null ? [] : [limit])].filter(fits);
  const end = merge => found.length ? found.reduce(merge) : 0;
  return [low ?? end(MERGES.min), high ?? end(MERGES.max)];
}

/** Draw a chart of modules.
 *
 * @param chart element with the parts of a chart.
 * @param data root, sizes, shades, categories (titles of the kinds), start ("kind 0" or "shade 0"), startWidth ("0").
 * @param classes class → number of its colour.
 * @param events onZoom(node), onReach(node); shadesBeside(title): numbers of another chart on the same scale; rowsOf(node): shows the rows of a module in a table, or null.
 * @returns the functions by which other parts of the page move the chart.
 */
function showIcicle(chart, data, classes, events = {}) {
  const find = selector => chart.querySelector(selector);
  const plot = find(".plot"), path = find(".path"), about = find("output"), toRows = find(".rows"), legend = find(".legend");
  const fold = find(".fold"), colour = find(".colour"), width = find(".width");
  const whole = measure(data.root), brief = measure(folded(whole, data.shades));
  const canFold = sizeOf(brief) < sizeOf(whole);
  let top = canFold ? brief : whole, selected = top, parents = new Map(), buttons = new Map(), ends = null, kindColours = null;

  const sizeIndex = () => Number(width.value || 0);
  const size = () => data.sizes[sizeIndex()];
  const [colourKind, colourIndex] = [() => colour.value.split(" ")[0], () => Number(colour.value.split(" ")[1])];
  const isShade = () => colourKind() === "shade";
  const total = node => node.totals[sizeIndex()] ?? 0;
  const share = node => total(whole) ? `${(100 * total(node) / total(whole)).toFixed(1)} %` : "";
  const root = () => canFold && fold.checked ? brief : whole;
  const name = node => node.members ? `${node.label} (${node.members.length} ×)` : node.label;
  const amount = node => node.totals[sizeIndex()] === null ? "?" : size().write(total(node));

  /** Return the second line of a box: its words, the value of the colour, or size and share. */
  function words(node) {
    if (node.words) return node.words;
    const shade = data.shades[isShade() ? colourIndex() : -1], value = shade && node.shades[colourIndex()];
    const words = [amount(node), share(node)].filter(Boolean).join(", ");
    if (!shade || value === null || isWidth(shade, node)) return words;
    if (data.statesValues) return `${shadeWords(shade, node, value)} · ${words}`;
    return node.members && shade.folded !== "sum" ? `${foldWords(shade)} ${shade.write(value)}` : words;
  }

  /** Whether the chosen width states the value of a shade. */
  const isWidth = (shade, node) => shade === size() && !node.children.length;
  const ownWords = (shade, node) => shade.isSize && node.children.length ? "own " : "";
  const shadeWords = (shade, node, value) =>
    `${node.members && shade.folded !== "sum" ? `${foldWords(shade)} ` : ""}${ownWords(shade, node)}${shade.write(value)}`;

  const foldWords = shade => shade.folded === "max" ? "largest" : "lowest";
  const place = node => {
    const shade = data.shades[colourIndex()], part = partOf(node.shades[colourIndex()], shade, ends);
    return shade.darkLow && ends[1] > ends[0] ? 1 - part : part;
  };

  function describe(node) {
    const spreadWords = (measure, spread) => spread && measure.write(spread[0]) !== measure.write(spread[1])
      ? [`${measure.title} of one ${measure.write(spread[0])} to ${measure.write(spread[1])}`] : [];
    const lines = node.members
      ? [node.lines[0] ?? node.label, `${node.members.length} equal modules`, `${size().title} ${amount(node)} together`,
        ...spreadWords(size(), node.sizeSpread[sizeIndex()]),
        ...data.shades.flatMap((shade, index) => shade.folded === "sum" || node.shades[index] === null ? []
          : [`${foldWords(shade)} ${shade.title}: ${shade.write(node.shades[index])}`])]
      : [...(node.lines.length ? node.lines : [node.label]), ...(data.statesValues ? [`${size().title} ${amount(node)}`] : [])];
    const shade = data.shades[isShade() ? colourIndex() : -1], value = shade && node.shades[colourIndex()];
    const isStated = node.members && shade?.folded !== "sum";
    const shadeLine = !data.statesValues || !shade || isStated || isWidth(shade, node) ? []
      : [value === null ? `${shade.title} unknown` : `${ownWords(shade, node)}${shade.title} ${shade.write(value)}`];
    const kinds = data.categories.flatMap((title, index) => node.kinds[index] ? [`${title} ${node.kinds[index]}`] : []);
    about.textContent = [...lines, ...(total(whole) ? [`${share(node)} of the width`] : []), ...shadeLine, ...kinds].join(" · ");
    toRows.hidden = !events.rowsOf || !selected.lines.length;
  }

  /** Return the boxes to draw, each as node, left end, width and level. */
  function layOut() {
    const boxes = [];
    const lay = (node, left, level, part) => {
      if (level && part < LEAST_WIDTH) return;
      boxes.push([node, left, part, level]);
      let next = left;
      for (const child of node.children) {
        const inner = total(top) ? total(child) / total(top) : part / node.children.length;
        lay(child, next, level + 1, inner);
        next += inner;
      }
    };
    lay(top, 0, 0, 1);
    return boxes;
  }

  /** Return the CSS colour of a module. */
  function colourOf(node) {
    if (isShade() && node.shades[colourIndex()] !== null)
      return `color-mix(in oklab, var(--cold), var(--hot) ${100 * place(node)}%)`;
    return `var(--c${isShade() ? COLOURS : kindColours.get(node.kinds[colourIndex()]) ?? COLOURS})`;
  }

  function boxOf([node, left, part, level]) {
    const box = button("", "", () => zoom(node === top ? parents.get(node) ?? node : node));
    box.style.cssText = `left:${100 * left}%;width:${100 * part}%;top:${level * ROW_REM}rem`;
    if (part >= LEAST_LABEL) {
      box.append(element("span", "", (node.isMarked ? "▶ " : "") + name(node)), element("span", "", words(node)));
    } else box.style.padding = "0";
    box.classList.toggle("heat", isShade() && node.shades[colourIndex()] !== null);
    box.style.background = colourOf(node);
    box.classList.toggle("marked", node.isMarked);
    box.setAttribute("role", "treeitem");
    box.setAttribute("aria-level", level + 1);
    box.setAttribute("aria-label", `${name(node)}, ${words(node)}`);
    box.tabIndex = node === selected ? 0 : -1;
    box.addEventListener("focus", () => reach(node));
    box.addEventListener("pointerenter", () => describe(node));
    return box;
  }

  /** Return kind → number of its colour. Classes have one colour on the whole page. */
  function coloursOf() {
    const index = colourIndex();
    if (index === 0) return classes;
    const kinds = new Set(), collect = node => { if (node.kinds[index]) kinds.add(node.kinds[index]); node.children.forEach(collect); };
    collect(whole);
    collect(root());  // also ${SEVERAL}
    const named = [...kinds].filter(kind => kind !== NEUTRAL).map((kind, position) => [kind, Math.min(position, COLOURS)]);
    return new Map(kinds.has(NEUTRAL) ? [...named, [NEUTRAL, COLOURS]] : named);
  }

  function draw() {
    parents = new Map();
    const known = (node, parent) => { parents.set(node, parent); for (const child of node.children) known(child, node); };
    known(root(), null);
    const boxes = layOut();
    if (!boxes.some(([node]) => node === selected)) selected = top;
    const shade = isShade() ? data.shades[colourIndex()] : null;
    if (shade) ends = scaleOf([...shadesIn(root(), colourIndex()), ...(events.shadesBeside?.(shade.title) ?? [])], shade);
    else kindColours = coloursOf();
    buttons = new Map(boxes.map(box => [box[0], boxOf(box)]));
    plot.replaceChildren(...buttons.values());
    plot.style.height = `${ROW_REM * (1 + Math.max(...boxes.map(([, , , level]) => level)))}rem`;
    drawPath();
    describe(selected);
    legend.replaceChildren();
    if (shade) drawRamp(legend, shade, ends);
    else drawLegend(legend, kindColours);
    events.onDraw?.();
  }

  /** Draw the modules around the selected one as buttons. */
  function drawPath() {
    const around = [];
    for (let node = top; node; node = parents.get(node)) around.unshift(node);
    path.replaceChildren(...around.flatMap((node, place) =>
      place === around.length - 1 ? [element("b", "", name(node))] : [button("", name(node), () => zoom(node)), " › "]));
  }

  function reach(node) {
    for (const box of buttons.values()) box.tabIndex = -1;
    buttons.get(node).tabIndex = 0;
    selected = node;
    describe(node);
    events.onReach?.(node);
  }

  function zoom(node, isQuiet = false) {
    const hadFocus = plot.contains(document.activeElement);
    top = selected = node;
    draw();
    if (hadFocus) buttons.get(node).focus();
    if (!isQuiet) events.onZoom?.(node);
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
  function refold() {
    const module = (top.members ?? [top])[0].module;
    top = selected = (module && nodeWhere(node => node.module === module)) ?? root();
  }
  fold.addEventListener("change", () => { refold(); draw(); });
  colour.addEventListener("change", draw);
  width.addEventListener("change", draw);
  toRows.addEventListener("click", () => events.rowsOf(selected));
  plot.addEventListener("pointerleave", () => describe(selected));

  const ways = [
    ...data.categories.flatMap((title, index) => index || classes.size > 1 ? [[`kind ${index}`, `by ${title}`]] : []),
    ...data.shades.map((shade, index) => [`shade ${index}`, `by ${shade.title}`]),
  ];
  fillChoice(colour, ways, ways.some(([key]) => key === data.start) ? data.start : ways.at(-1)?.[0] ?? "kind 0");
  fillChoice(width, data.sizes.map((size, index) => [String(index), size.title]), data.startWidth);
  fold.parentElement.hidden = !canFold;
  draw();

  /** Return the displayed node that stands for a module, by a test of the nodes of the file. */
  function nodeWhere(matches, node = root()) {
    if ((node.members ?? [node]).some(matches)) return node;
    for (const child of node.children) {
      const found = nodeWhere(matches, child);
      if (found) return found;
    }
    return null;
  }

  return {
    /** Zoom to the module that a test accepts, without an event. */
    zoomTo: matches => { const node = nodeWhere(matches); if (node) zoom(node, true); },
    /** Outline the modules that a test accepts; null: none. */
    highlight: matches => {
      for (const [node, box] of buttons) box.classList.toggle("found", !!matches && (node.members ?? [node]).some(matches));
    },
    /** Choose width, colour and folding; the module at the top stays. */
    choose: (sizeKey, colourKey, isFolded) => {
      width.value = sizeKey;
      colour.value = colourKey;
      if (canFold && fold.checked !== isFolded) { fold.checked = isFolded; refold(); }
      draw();
    },
    redraw: draw,
    /** Return the displayed values of a shade. */
    shadesOf: title => {
      const index = data.shades.findIndex(shade => shade.title === title);
      return index < 0 ? [] : shadesIn(root(), index);
    },
    choices: () => [width.value, colour.value, fold.checked],
    onChoice: listener => { for (const choice of [width, colour, fold]) choice.addEventListener("change", listener); },
    colourOf,
  };
}

/** Return class → number of its colour in all charts of the page, those with most of the charts first. */
function classColours(roots) {
  const sums = new Map();
  const add = (node, whole) => {
    if (node.kinds[0]) sums.set(node.kinds[0], (sums.get(node.kinds[0]) ?? 0) + (node.sizes[0] ?? 0) / whole);
    for (const child of node.children) add(child, whole);
  };
  for (const root of roots) add(root, measure(root).totals[0] || 1);
  const names = [...sums].sort((left, right) => right[1] - left[1]).map(([kind]) => kind);
  return new Map(names.map((kind, place) => [kind, Math.min(place, COLOURS)]));
}

/** Return the classes of a tree with their colours. */
function classesIn(root, colours) {
  const kinds = new Set(), collect = node => { kinds.add(node.kinds[0]); node.children.forEach(collect); };
  collect(root);
  return new Map([...colours].filter(([kind]) => kinds.has(kind)));
}

function drawLegend(legend, classes) {
  const swatch = (style, words) => {
    const entry = element("span"), sign = element("i");
    sign.style.background = `var(--c${style})`;
    entry.append(sign, words.length > MOST_LETTERS ? `${words.slice(0, MOST_LETTERS - 1)}…` : words);
    entry.title = words;
    return entry;
  };
  const named = [...classes].filter(([, place]) => place < COLOURS), others = [...classes.keys()].slice(named.length);
  const rest = others.length ? [swatch(COLOURS, others.length > 1 ? `others (${others.length})` : others[0])] : [];
  legend.replaceChildren(...named.map(([kind, place]) => swatch(place, kind)), ...rest);
}

function drawRamp(legend, shade, ends) {
  const limit = shade.limit ?? null, ramp = element("i", shade.darkLow ? "ramp reversed" : "ramp");
  const [low, high] = ends.map(shade.write), title = shade.isSize ? `${shade.title} of a module without the modules inside it` : shade.title;
  if (limit !== null) ramp.append(Object.assign(element("u"), { style: `left:${100 * partOf(limit, shade, ends)}%` }));
  legend.replaceChildren(`${title}: ${shade.logarithmic && ends[1] > 0 ? "≤ " : ""}${low} `, ramp, high, ...(limit === null ? [] : [` ▏${shade.limitWords}`]));
}
