// --- The modules of a model, expanded from templates: equal modules are stored once in the page.
//
// A template has: c class, n own numbers, b bytes and parameters of weights, w weights, i types of its inputs, o sources
// of its outputs, x items. An item is a node [name, operator, inputs, outputs, facts?] or a module [label, path,
// template, inputs]. A source is [item, output], or [INPUT, n], [WEIGHT, n] or [ABSENT, n].

const INPUT = -1, WEIGHT = -2, ABSENT = -3;
const OWN_NUMBERS = ["nodes", "parameters", "size_bytes", "macs"];

/** Return the prefix of the names of the nodes of a module, as torch writes it. */
const scopeOf = path => path ? `/${path.replace(/\.(?!\d+(?:\.|$))/g, "/")}` : "";

/** Return the path of an inner module. */
function innerPath(outer, relative) {
  if (relative.startsWith("=")) return relative.slice(1);
  return outer ? outer + relative : relative.replace(/^\./, "");
}

/** Return the outermost module of a part of a model, with all modules below it. */
function expandPart(data, part, model) {
  const counter = { next: 0 };
  const expand = (number, label, path, tag, parent, sources) => {
    const template = data.templates[number], isGroup = !!template.g;
    const module = {
      isModule: true, template, label, path, tag, parent, sources, part, model, isGroup, data,
      index: counter.next++, className: data.texts[template.c], children: [], items: null,
    };
    for (const item of template.x ?? []) {
      if (typeof item[1] !== "string") continue;
      const isInnerGroup = !!data.templates[item[2]].g;
      module.children.push(expand(item[2], item[0], innerPath(path, item[1]), isInnerGroup ? tag : `${tag}/${item[0]}`, module, item[3]));
    }
    return module;
  };
  return expand(part.template, part.label, part.path, part.tag, null, []);
}

/** Return the outermost module of a model. The parts of a folder are modules of one that stands for the folder. */
function expandModel(data, model) {
  const roots = model.parts.map(part => expandPart(data, part, model));
  if (roots.length === 1) return roots[0];
  const inputs = [], fed = new Map(model.feeds.map(([from, output, to, input]) => [`${to} ${input}`, [from, output]]));
  roots.forEach((root, position) => root.part.inputs.forEach((name, index) => {
    const [from, output] = fed.get(`${root.part.name} ${name}`) ?? [];
    const maker = from === root.part.name ? -1 : roots.findIndex(other => other.part.name === from);
    const port = maker < 0 ? -1 : roots[maker].part.outputs.indexOf(output);
    if (port >= 0) root.sources.push([maker, port]);
    else {
      root.sources.push([INPUT, inputs.length]);
      inputs.push([name, (root.template.i ?? [])[index]]);
    }
    root.position = position;
  }));
  const folder = {
    isModule: true, label: model.name, path: "", tag: "", parent: null, sources: [], model, data, index: -1, className: "",
    part: { inputs: inputs.map(([name]) => name), outputs: [], measures: [] }, children: roots, items: roots, isFolder: true,
    template: { n: [0, 0, 0, 0], i: inputs.map(([, type]) => type), o: [] },
  };
  for (const root of roots) Object.assign(root, { parent: folder, label: `${root.part.name}: ${root.label}` });
  return folder;
}

/** Return the modules from the outermost one to this one. */
function lineage(module) {
  const found = [];
  for (let above = module; above; above = above.parent) found.unshift(above);
  return found;
}

/** Return a module and all modules below it. */
function* modulesIn(module) {
  yield module;
  for (const child of module.children) yield* modulesIn(child);
}

/** Return the name that a template abbreviates. */
function fullName(module, name) {
  if (!name.startsWith("~")) return name;
  if (name.startsWith("~~")) return name.slice(1);
  if (name.startsWith("~^")) return outputName(module, Number(name.slice(2)));
  const [, up, rest] = name.match(/^~(\d+)([\s\S]*)$/);
  module.paths ??= [...new Set(lineage(module).reverse().map(above => above.path).filter(Boolean))];
  const path = module.paths[Number(up)] ?? "";
  return (rest.startsWith("/") ? scopeOf(path) : path) + rest;
}

/** Return the name of an output of a module that is an output of the graph. */
function outputName(module, port) {
  const { parent, part } = module;
  if (!parent || parent.isFolder) return part.outputs[port] ?? "";
  const number = parent.template.o.findIndex(([first, second]) => second === port && itemAt(parent, first) === module);
  return outputName(parent, number);
}

/** Return the inner module at a position among the items of a module; undefined for a node. */
function itemAt(module, position) {
  const before = module.template.x.slice(0, position).filter(item => typeof item[1] === "string").length;
  return typeof module.template.x[position]?.[1] === "string" ? module.children[before] : undefined;
}

/** Return the nodes and modules of a module, in the order of the graph. */
function itemsOf(module) {
  if (module.items) return module.items;
  let child = 0;
  module.items = (module.template.x ?? []).map((item, position) => {
    if (typeof item[1] === "string") return module.children[child++];
    const [name, operator, inputs, outputs, facts = {}] = item;
    return {
      isModule: false, module, position, sources: inputs, name: fullName(module, name), operator: module.data.texts[operator],
      outputs: outputs.map(([output, type]) => ({ name: fullName(module, output), type: module.data.texts[type] })),
      attributes: facts.a ?? [], source: facts.s ?? "", metadata: (facts.m ?? []).map(([key, text]) => [key, metadataWords(module, text)]),
      macs: facts.f === "?" ? null : facts.f ?? 0, place: facts.p ?? "",
    };
  });
  return module.items;
}

/** Return a metadata text with the full paths of its modules. */
const metadataWords = (module, text) => text.split(", ").map(word => /^~\d/.test(word) ? fullName(module, `${word}.`).replace(/\.$/, "") : word).join(", ");

/** Return the weights of a module. */
function weightsOf(module) {
  module.weights ??= (module.template.w ?? []).map(([name, type, kind, bytes, parameters]) =>
    ({ isWeight: true, kind, bytes, parameters, name: fullName(module, name), type: module.data.texts[type], owner: module }));
  return module.weights;
}

/** Return the origin of a source inside a module: {name, type} with `item` for a node, `weight`, or `input`; or null. */
function originOf(module, [first, second]) {
  if (first === ABSENT) return null;
  if (first === WEIGHT) return { weight: weightsOf(module)[second], ...weightsOf(module)[second] };
  if (first === INPUT) {
    if (module.parent) return originOf(module.parent, module.sources[second]);
    const type = module.data.texts[(module.template.i ?? [])[second]];
    return { input: second, name: module.part.inputs[second] ?? "", type };
  }
  const item = itemsOf(module)[first];
  if (item.isModule) return originOf(item, item.template.o[second]);
  return { item, ...item.outputs[second] };
}

/** Return the own numbers of a module by name; null: unknown. */
const ownNumbers = module => Object.fromEntries(OWN_NUMBERS.map((name, index) => [name, module.template.n[index]]));

/** Return the numbers of a module and the modules below it. */
function totalNumbers(module) {
  if (module.total) return module.total;
  const total = ownNumbers(module);
  const [bytes, parameters] = module.template.b ?? [0, 0];
  Object.assign(total, { weightBytes: bytes, weightParameters: parameters });
  for (const child of module.children)
    for (const [name, value] of Object.entries(totalNumbers(child)))
      total[name] = total[name] === null || value === null ? null : total[name] + value;
  return module.total = total;
}

/** Return the bits per parameter of a module; null without weights. */
function bitsOf(module) {
  const { weightBytes, weightParameters } = totalNumbers(module);
  return weightParameters ? 8 * weightBytes / weightParameters : null;
}

/** Return the tensors that enter and leave a module. */
function portsOf(module) {
  const inputs = (module.template.i ?? []).map((_, index) => originOf(module, [INPUT, index])).filter(origin => origin && !origin.weight);
  return [inputs, (module.template.o ?? []).map(source => originOf(module, source)).filter(Boolean)];
}

/** Return the modules that a selector of the commands matches: a glob over path, tag, class or tree name. */
function selectorTest(text) {
  const isTag = text.includes("/"), namesClass = !/[*?[]/.test(text.split(".")[0]);
  const pattern = (separator, glob = text) => new RegExp(`^${glob.split(/(\*\*[./]?|\*|\?)/).map(word => {
    if (word === "**") return "[\\s\\S]*";
    if (word.startsWith("**")) return `(?:[\\s\\S]*${word[2] === "." ? "\\." : "/"})?`;
    if (word === "*") return separator ? `[^${separator}]*` : ".*";
    if (word === "?") return separator ? `[^${separator}]` : ".";
    return word.replace(/[.+^${}()|\\]/g, "\\$&").replaceAll("[!", "[^");
  }).join("")}$`);
  const safe = separator => { try { return pattern(separator); } catch { return /^$(?!)/; } };
  const [byTag, byPath, byClass] = [safe("/"), safe("."), safe("")];
  return module => isTag ? byTag.test(module.tag)
    : byPath.test(module.path) || byClass.test(module.className) || (namesClass && byPath.test(module.label));
}
