// --- What is known of the selected module or node, and the commands that act on it.

/** Return a word of a command line, quoted if necessary: for a POSIX shell, or a path of Windows for its shells. */
const shellWord = word => /^[\w./:@%+=,-]+$/.test(word) ? word
  : /^[\w .:\\-]*\\[\w .:\\-]*$/.test(word) ? `"${word}"` : `'${word.replaceAll("'", "'\\''")}'`;

/** Return selectors of modules for the commands, by path or tag: one with * for numbers that differ, unless it selects others. */
function selectorsOf(modules) {
  const [first] = modules, key = modules.every(module => module.path) ? "path" : "tag";
  const own = [...new Set(modules.map(module => module[key]))], words = own.map(name => name.split(/(\d+)/));
  if (own.length === 1 || words.some(other => other.length !== words[0].length)) return own;
  const pattern = words[0].map((word, index) => words.every(other => other[index] === word) ? word : "*").join("");
  const isSelected = selectorTest(pattern), part = lineage(first).find(module => module.part === first.part);
  return [...modulesIn(part)].every(module => module.isGroup || !isSelected(module) || own.includes(module[key])) ? [pattern] : own;
}

/** Return the commands that act on modules of a file or checkpoint, each with its purpose.
 *
 * @param twins the same modules in the other model: a quantized file is quantized again from its floating-point source.
 */
function commandsFor(modules, twins = []) {
  const [{ model, part, parent, isFolder }] = modules, isCheckpoint = !part?.file;
  const file = isCheckpoint ? model.file : part.file, selectors = selectorsOf(modules);
  if (!selectors[0] || isFolder) return [];
  const [name, module, stem] = [shellWord(file), shellWord(selectors[0]), file.replace(/\.onnx$/i, "")];
  const floats = [modules, twins].find(found => found[0]?.part?.file && !found[0].part.isQuantized && found.every(Boolean));
  const floatFile = floats?.[0].part.file, ofFloat = floats && floats !== modules ? ` of ${floatFile}` : "";
  if (!parent || parent.isFolder) return isCheckpoint ? [["export it", `winml export ${name} -o model.onnx`]] : [
    ["show the module tree", `winml inspect ${name} -H`],
    ["measure every module", `winml perf ${name} --by-module`],
    ...(floats ? [[`find the modules${ofFloat} that lose most by quantization`, `winml quantize ${shellWord(floatFile)} --sensitivity`]] : []),
  ];
  const excluded = floats && selectorsOf(floats).map(selector => `--exclude ${shellWord(selector)}`).join(" ");
  const ofFile = isCheckpoint ? [] : [
    ["show its nodes", `winml inspect ${name} --module ${module}`],
    ...(floats ? [[`quantize all but it${ofFloat}`,
      `winml quantize ${shellWord(floatFile)} ${excluded} -o ${shellWord(floatFile.replace(/(\.onnx)?$/i, "_quantized.onnx"))}`]] : []),
  ];
  return selectors.length > 1 ? ofFile.slice(1) : [
    ["measure it alone", `winml perf ${name} --module ${module}`],
    ["cut it out", `winml extract ${name} --module ${module} -o ${shellWord(isCheckpoint ? "modules" : `${stem}_module`)}`],
    ...ofFile,
  ];
}

/** Copy a text, also from a page that was opened as a file. */
async function copyText(text, place) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = element("textarea", "", text);
    place.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

function commandList(modules, twins) {
  const list = element("ul", "commands");
  for (const [words, command] of commandsFor(modules, twins)) {
    const entry = element("li"), copy = button("copy", "copy", async () => {
      await copyText(command, entry);
      copy.textContent = "copied";
      setTimeout(() => { copy.textContent = "copy"; }, 1500);
    });
    copy.setAttribute("aria-label", `copy the command to ${words}`);
    entry.append(element("span", "", words), copy, element("code", "", command));
    list.append(entry);
  }
  return list.children.length ? [element("h4", "", "Commands"), list] : [];
}

/** Return the pieces of a name, between which a line may break: after dots and slashes. */
const breakable = text => text.split(/(?<=[./])(?=.)/).flatMap((piece, index) => index ? [element("wbr"), piece] : [piece]);

/** Return a table of texts; the columns whose titles end with # are numbers. */
function smallTable(titles, rows) {
  const table = element("table", "small"), head = table.createTHead().insertRow(), body = table.createTBody();
  for (const title of titles) {
    const cell = element("th", title.endsWith("#") ? "number" : "");
    cell.append(...breakable(title.replace("#", "")));
    head.append(cell);
  }
  for (const row of rows) {
    const line = body.insertRow();
    row.forEach((cell, index) => {
      const made = element("td", titles[index].endsWith("#") ? "number" : "");
      made.dataset.label = titles[index].replace("#", "");
      made.append(...(typeof cell === "string" && !titles[index].endsWith("#") ? breakable(cell) : [cell]));
      line.append(made);
    });
  }
  const scroll = element("div", "scroll");
  scroll.append(table);
  return scroll;
}

const bitsWords = weight => weight.parameters && weight.bytes !== null
  ? `${Number((8 * weight.bytes / weight.parameters).toPrecision(3))}${weight.kind && !weight.type.startsWith(weight.kind) ? `, ${weight.kind}` : ""}` : "";

const histogramOf = weight => lookUp(weight.owner.part.histograms, weight.name);

/** Return the distribution of the values of a weight as bars between its smallest and its largest value. */
function histogramChart(histogram) {
  if (!histogram) return "";
  const [low, high, heights] = histogram, chart = element("span", "histogram"), cell = element("span");
  chart.append(...[...heights].map(height => Object.assign(element("i"), { style: `height:${100 * parseInt(height, 36) / 35}%` })));
  cell.append(chart, element("small", "", `${numberWords(low)} … ${numberWords(high)}`));
  return cell;
}

function weightTable(weights) {
  if (!weights.length) return [];
  const hasCharts = weights.some(histogramOf);
  const rows = weights.map(weight => [
    weight.name, weight.type, ...(hasCharts ? [histogramChart(histogramOf(weight))] : []), bitsWords(weight),
    weight.bytes === null ? "?" : bytesWords(weight.bytes),
  ]);
  return [element("h4", "", "Weights"), smallTable(["name", "type", ...(hasCharts ? ["values"] : []), "bits", "size#"], rows)];
}

function valueTable(title, values) {
  return values.length ? [element("h4", "", title), smallTable(["name", "type"], values.map(({ name, type }) => [name, type]))] : [];
}

/** Return the description of a node. */
function describeNode(node) {
  const origins = node.sources.map(source => originOf(node.module, source)).filter(Boolean);
  return [
    element("h3", "", node.operator),
    fieldList([
      ["node", node.name], ["module", node.module.path || node.module.tag || node.module.label], ["tag", node.module.tag],
      ["source of the tag", node.source], ["in", node.place],
      ["MACs", node.macs === null ? "?" : node.macs ? countWords(node.macs) : ""],
      ...node.metadata,
    ]),
    ...valueTable("Inputs", origins.filter(origin => !origin.weight)),
    ...weightTable(origins.filter(origin => origin.weight).map(origin => origin.weight)),
    ...valueTable("Outputs", node.outputs.filter(output => output.name)),
    ...(node.attributes.length ? [element("h4", "", "Attributes"), smallTable(["name", "value"], node.attributes)] : []),
  ];
}

/** Return the number of a module in a measure: with the modules inside it if the measure is a size. */
const knownValue = (measure, module) => measure.isSize ? measure.total(module) : measure.own(module);

/** Return the description of one module, or of equal modules.
 *
 * @param modules the modules.
 * @param measures everything that is known of modules.
 * @param other () → the same modules in the other model, with its measures, or null.
 */
function describeModule(modules, measures, other) {
  const [module] = modules, [inputs, outputs] = portsOf(module), several = modules.length > 1;
  const written = (measure, module) => {
    const value = knownValue(measure, module);
    return value === null || value === undefined ? "" : measure.isText ? value : measure.write(value);
  };
  const rows = measures.filter(measure => modules.some(module => written(measure, module) !== "")).map(measure => {
    const values = modules.map(module => knownValue(measure, module)).filter(value => value !== null && value !== undefined);
    if (measure.isText || !several) return [measure.title, written(measure, module), measure.isSize ? shareWords(measure, module) : ""];
    const [low, high] = [Math.min(...values), Math.max(...values)];
    return [measure.title, low === high ? `${measure.write(low)} each` : `${measure.write(low)} to ${measure.write(high)}`, ""];
  });
  return [
    element("h3", "", several ? `${modules.length} equal modules` : module.label),
    fieldList([
      ["class", module.className], [several ? "selector" : "path", several ? selectorsOf(modules).join(", ") : module.path],
      ["tag", several ? "" : module.tag],
    ]),
    ...(other ? comparedTable(modules, measures, other) : [smallTable(["", "value#", "of the model#"], rows)]),
    ...commandList(modules, other?.modules),
    ...valueTable("Inputs", inputs), ...valueTable("Outputs", outputs), ...weightTable(several ? [] : weightsOf(module)),
  ];
}

function shareWords(measure, module) {
  const whole = measure.total(lineage(module)[0]), value = measure.total(module);
  return whole && value !== null ? `${(100 * value / whole).toFixed(1)} %` : "";
}
