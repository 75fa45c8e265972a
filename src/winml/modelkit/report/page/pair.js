// --- Two models side by side.

/** Let a choice of width, colour or folding in one chart apply to the other, if the other has the same measure. Both have one scale of colours. */
function linkChoices(sides, measures) {
  const titles = side => {
    const known = measures[side], sizes = known.filter(measure => measure.isSize), shades = known.filter(measure => !measure.isText);
    const texts = known.filter(measure => measure.isText);
    return {
      "": sizes.map(size => size.key), shade: shades.map(shade => shade.key), kind: ["class", ...texts.map(text => text.key)],
    };
  };
  const translate = (choice, from, to) => {
    const [kind, index] = choice.includes(" ") ? choice.split(" ") : ["", choice];
    const place = titles(to)[kind].indexOf(titles(from)[kind][Number(index)]);
    return place < 0 ? null : `${kind} ${place}`.trim();
  };
  sides.forEach(({ icicle }, side) => icicle.onChoice(() => {
    const [width, colour, isFolded] = icicle.choices(), other = sides[1 - side].icicle, [oldWidth, oldColour] = other.choices();
    other.choose(translate(width, side, 1 - side) ?? oldWidth, translate(colour, side, 1 - side) ?? oldColour, isFolded);
    icicle.redraw();
  }));
  // The first chart was drawn without the numbers of the second.
  for (const { icicle } of sides) icicle.redraw();
}

/** Return the table of both models: values, and their ratio with its verdict if one was measured. */
function comparedTable(modules, measures, other) {
  const titles = [...new Set([...measures, ...other.measures].map(measure => measure.title))];
  const combined = (known, members, title) => {
    const measure = known.find(entry => entry.title === title), present = members.filter(Boolean);
    if (!measure || !present.length) return [null, "–"];
    const values = present.map(module => knownValue(measure, module)).filter(value => value !== null && value !== undefined);
    if (!values.length) return [null, "–"];
    if (measure.isText) return [null, [...new Set(values)].join(", ")];
    const value = measure.isSize ? values.reduce((sum, number) => sum + number, 0) : values.reduce((a, b) => MERGES[measure.folded === "sum" ? "max" : measure.folded](a, b));
    return [value, measure.write(value)];
  };
  const rows = titles.map(title => {
    const pair = [combined(measures, modules, title), combined(other.measures, other.modules, title)];
    if (other.side) pair.reverse();
    const [[before, beforeWords], [after, afterWords]] = pair;
    const ratio = before && after !== null ? after === before ? "equal" : `×\u00a0${(after / before).toPrecision(3)}` : beforeWords === afterWords && beforeWords !== "–" ? "equal" : "";
    return [title, beforeWords, afterWords, ratio];
  }).filter(([, before, after]) => before !== "–" || after !== "–");
  const missing = other.modules.every(module => !module);
  const changes = modules.length === 1 ? changeLines(modules[0], other) : [];
  return [
    ...(missing ? [element("p", "note", `This module is only in ${other.names[other.side]}.`)] : []),
    ...(changes.length ? [element("h4", "", "Changes"), ...changes.map(line => element("p", "change", line))] : []),
    Object.assign(smallTable(["", `${other.names[0]}#`, `${other.names[1]}#`, "ratio#"], rows), { className: "scroll compared" }),
  ];
}

/** Return the sentences on the change of a module. */
function changeLines(module, { data, side, modules: [twin] }) {
  const after = side ? module : twin ?? module;
  return data.changes?.[`${after.part.name} ${after.tag}`] ?? [];
}

/** Return the name of a node, or the name of its first output if it has none. */
const keyOf = node => node.name || node.outputs.find(output => output.name)?.name || "";

/** Return the nodes of the other model that a node replaced, or by which it was replaced. */
function becameFields(node, data) {
  const { model, part } = node.module, isAfter = data.models.length > 1 && model === data.models[1];
  const replaced = isAfter ? lookUp(data.replaced?.[part.name], keyOf(node)) : lookUp(data.replacedBy?.[part.name], keyOf(node));
  return replaced?.length ? [element("h4", "", isAfter ? "Replaces" : "Replaced by"), smallTable(["node"], replaced.map(name => [name]))] : [];
}

/** Return the mark of a node that stands for several nodes, or is new or gone. */
function becameMark(node, data) {
  const { model, part } = node.module, replaced = data.replaced?.[part.name] ?? {};
  if (data.models.length < 2) return "";
  if (model === data.models[1]) {
    const names = lookUp(replaced, keyOf(node));
    return !names ? "" : !names.length ? "new" : names.length > 1 ? `${names.length} → 1` : "changed";
  }
  const names = lookUp(data.replacedBy?.[part.name], keyOf(node));
  return !names ? "" : !names.length ? "gone" : names.some(name => replaced[name].length > 1) ? "fused" : "changed";
}
