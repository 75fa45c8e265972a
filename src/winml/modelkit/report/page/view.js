// --- The page of one or two models: modules, graph and details follow one selection.

const bytesWords = value => {
  const scale = [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([factor]) => value >= factor);
  return scale ? `${Number((value / scale[0]).toPrecision(3))} ${scale[1]}` : `${value} bytes`;
};
const UNITS = { bytes: bytesWords, count: countWords };

/** Return the measures that every file has. */
function structuralMeasures() {
  const sum = (name, title, write) => ({
    key: name, title, write, isSize: true, folded: "sum",
    own: module => ownNumbers(module)[name], total: module => totalNumbers(module)[name],
  });
  return [
    sum("parameters", "parameters", countWords), sum("size_bytes", "bytes of weights", bytesWords),
    sum("nodes", "nodes", value => String(value)), sum("macs", "MACs", countWords),
    { key: "bits", title: "bits of a parameter", write: numberWords, folded: "max", own: bitsOf, total: bitsOf },
  ];
}

/** Return the measures of earlier runs: a number or text for each module of each part. */
function recordedMeasures(model) {
  return model.measures.map(measure => {
    const write = UNITS[measure.unit] ?? (value => `${numberWords(value)} ${measure.unit}`.trim());
    // A run has no number of a module without kernels of its own: it adds nothing.
    const own = module => module.part.measures?.[measure.key]?.[module.index] ?? (measure.isSize ? 0 : null);
    const total = module => !measure.isSize ? own(module) : module.children.reduce((sum, child) => sum + total(child), own(module));
    return { ...measure, write, own, total };
  });
}

/** Return the measures of a model of which any module has a value, and parameters in any case: boxes need a width. */
function knownMeasures(model, root) {
  const modules = [...modulesIn(root)];
  return [...structuralMeasures(), ...recordedMeasures(model)].filter((measure, place) => !place
    || modules.some(module => { const value = measure.own(module); return value !== null && value !== 0 && value !== ""; }));
}

/** Return a module as a node of the chart. */
function chartNode(module, sizes, shades, texts) {
  const number = value => value === undefined ? null : value;
  return {
    module, label: module.label, words: "", isMarked: false,
    lines: [module.path || module.label, ...(module.path ? [module.tag] : [])],
    foldedBy: texts.filter(text => !text.isVerdict).map(text => text.own(module) ?? ""),
    kinds: [module.isGroup ? "" : module.className, ...texts.map(text => text.own(module) ?? "")],
    sizes: sizes.map(size => number(size.own(module))), shades: shades.map(shade => number(shade.own(module))),
    children: module.children.map(child => chartNode(child, sizes, shades, texts)),
  };
}

/** Return the word for the change of a module; empty for an equal one. */
function changeOf(module) {
  const change = module.part.measures.change?.[module.index] ?? "";
  return change === NEUTRAL ? "" : change;
}

/** Return the node or inner module that reads a weight, in the module of the weight; undefined if none does. */
function readerOf(weight) {
  const place = weightsOf(weight.owner).indexOf(weight);
  return itemsOf(weight.owner).find(item => item.sources.some(([first, second]) => first === WEIGHT && second === place));
}

const modulesOf = node => (node.members ?? [node]).map(member => member.module);

/** Return the first choices of width and colour of a chart, which the page states by their titles. */
function startChoices({ width, colour }, sizes, shades, texts) {
  const place = (measures, title) => measures.findIndex(measure => measure.title === title), shade = place(shades, colour);
  return { startWidth: String(Math.max(0, place(sizes, width))), start: shade < 0 ? `kind ${1 + place(texts, colour)}` : `shade ${shade}` };
}

/** Show one side: its chart of modules and its graph. */
function showSide(view, side, root, measures, colours, events) {
  const chart = view.querySelectorAll(".boxes")[side], frame = view.querySelectorAll(".graph")[side];
  const sizes = measures.filter(measure => measure.isSize), texts = measures.filter(measure => measure.isText);
  const shades = measures.filter(measure => !measure.isText);
  const tree = chartNode(root, sizes, shades, texts), nodes = new Map();
  const collect = node => { nodes.set(node.module, node); node.children.forEach(collect); };
  collect(tree);
  let graph = null;
  const icicle = showIcicle(chart, {
    root: tree, statesValues: true, sizes, shades, categories: ["class", ...texts.map(text => text.title)],
    ...startChoices(root.data, sizes, shades, texts),
  }, colours(tree), {
    onReach: node => events.onModules(modulesOf(node)),
    onZoom: node => events.onZoom(modulesOf(node)),
    onDraw: () => graph?.repaint(),
    shadesBeside: events.shadesBeside,
  });
  graph = showGraph(frame, root, {
    onSelect: item => events.onItem(item),
    onEnter: module => events.onEnter(module),
    onToggle: (module, isOpen) => events.onToggle(module, isOpen),
    onTensors: events.onTensors,
    onTool: events.onTool,
    colourOf: module => module.isGroup ? "" : icicle.colourOf(nodes.get(module)),
    markOf: events.markOf,
  });
  return { root, icicle, graph };
}

/** Return the module at the same place of the other model; null if there is none. */
function counterpart(module, otherRoot, renamed) {
  const partName = module.part.name, tag = renamed.get(`${partName} ${module.tag}`) ?? module.tag;
  for (const other of modulesIn(otherRoot))
    if (other.tag === tag && other.isGroup === module.isGroup && other.label === (module.isGroup ? module.label : other.label) && other.part.name === partName) return other;
  return null;
}

function showView(view) {
  const data = JSON.parse(view.querySelector("script").textContent), details = view.querySelector(".details");
  const roots = data.models.map(model => expandModel(data, model));
  const measures = roots.map((root, side) => knownMeasures(data.models[side], root));
  const trees = roots.map((root, side) => chartNode(root, measures[side].filter(measure => measure.isSize), [], []));
  const everyColour = classColours(trees), colours = tree => classesIn(tree, everyColour);
  const renames = data.renamed ?? [];
  const renamedFrom = [
    new Map(renames.map(([part, after, before]) => [`${part} ${before}`, after])),
    new Map(renames.map(([part, after, before]) => [`${part} ${after}`, before])),
  ];
  const sideOf = item => roots.indexOf(lineage(item.isModule ? item : item.module)[0]);
  const twin = module => roots.length > 1 ? counterpart(module, roots[1 - sideOf(module)], renamedFrom[sideOf(module)]) : null;

  function describe(parts) {
    details.replaceChildren(...parts);
    details.scrollTop = 0;
  }
  function showModules(modules) {
    const side = sideOf(modules[0]);
    describe(describeModule(modules, measures[side], roots.length > 1 ? { side, modules: modules.map(twin), measures: measures[1 - side], names: data.models.map(model => model.name), data } : null));
  }
  function showItem(item) {
    if (item.isPort) describe([element("h3", "", item.isInput ? "Input" : "Output"), ...valueTable("Tensor", [item.origin])]);
    else if (item.isModule) showModules([item]);
    else describe([...describeNode(item), ...becameFields(item, data)]);
  }
  /** Show a module in the graph of its model, and the same place in the other model. */
  function enterBoth(module, isInChart) {
    const side = sideOf(module), other = twin(module);
    if (isInChart) sides[side].graph.enter(module);
    else sides[side].icicle.zoomTo(node => node.module === module);
    if (!other) return;
    sides[1 - side].graph.enter(other);
    sides[1 - side].icicle.zoomTo(node => node.module === other);
  }

  const sides = [];
  roots.forEach((root, side) => sides.push(showSide(view, side, root, measures[side], colours, {
    onModules: showModules,
    onZoom: modules => { showModules(modules); enterBoth(modules[0], true); },
    shadesBeside: title => sides[1 - side]?.icicle.shadesOf(title) ?? [],
    onItem: showItem,
    onToggle: (module, isOpen) => {
      const other = twin(module);
      if (other) sides[sideOf(other)].graph.setOpen(other, isOpen);
    },
    onTensors: tensors => describe(valueTable(countNoun(tensors.length, "tensor"), tensors)),
    onTool: name => { if (sides.length > 1) sides[1 - side].graph.use(name); },
    onEnter: module => { showModules([module]); enterBoth(module, false); },
    markOf: item => item.isModule ? changeOf(item) : becameMark(item, data),
  })));
  if (sides.length > 1) linkChoices(sides, measures);
  showSearch(view.querySelector(".search"), roots, found => {
    const modules = new Set(found.map(item => item.isModule ? item : item.module ?? item.owner));
    for (const { icicle } of sides) icicle.highlight(modules.size ? node => modules.has(node.module) : null);
  }, found => {
    const item = found.isWeight ? readerOf(found) ?? found.owner : found;
    const outerOf = module => item.isModule ? module.parent ?? module : module;
    const side = sides[sideOf(item)], module = item.isModule ? item : item.module, other = twin(module);
    side.icicle.zoomTo(node => node.module === outerOf(module));
    side.graph.reveal(item);
    if (other) {
      const { icicle, graph } = sides[1 - sideOf(item)];
      icicle.zoomTo(node => node.module === outerOf(other));
      if (item.isModule) graph.reveal(other);
      else graph.enter(other);
    }
    if (found.isWeight) describe([element("h3", "", found.name), fieldList([["module", found.owner.path || found.owner.label]]), ...weightTable([found])]);
    else showItem(item);
    side.graph.focus();
    view.querySelector(".panes").scrollIntoView({ block: "start" });
  });
  showModules([roots.at(-1)]);
}

for (const view of document.querySelectorAll(".view")) showView(view);
