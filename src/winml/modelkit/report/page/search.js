// --- Search of modules, nodes and weights: a part of a name, a selector of the commands, or op:OPERATOR.

const MOST_FOUND = 60;  // results that are listed at once

/** Return a test of modules, nodes and weights; {module, node, weight}, of which some may be missing. */
function searchTest(text) {
  const words = text.trim();
  if (words.startsWith("op:")) {
    const wanted = new RegExp(`^(?:.*\\.)?${words.slice(3).replace(/[.+^${}()|[\]\\]/g, "\\$&").replaceAll("*", ".*").replaceAll("?", ".")}$`, "i");
    return { node: node => wanted.test(node.operator) };
  }
  if (/[*?]/.test(words)) return { module: selectorTest(words) };
  const lower = words.toLowerCase(), has = name => name.toLowerCase().includes(lower);
  return {
    module: module => has(module.path) || has(module.className) || has(module.tag),
    node: node => has(node.name) || has(node.operator) || node.outputs.some(output => has(output.name)),
    weight: weight => has(weight.name),
  };
}

/** Return the modules, weights and nodes of models that a text finds, in the order of the graph. */
function findItems(roots, text) {
  if (!text.trim()) return [];
  const { module: isModule, node: isNode, weight: isWeight } = searchTest(text), modules = [], nodes = [], weights = [];
  for (const root of roots)
    for (const module of modulesIn(root)) {
      if (isModule && !module.isGroup && isModule(module)) modules.push(module);
      if (isWeight) weights.push(...weightsOf(module).filter(isWeight));
      if (isNode) nodes.push(...itemsOf(module).filter(item => !item.isModule && isNode(item)));
    }
  return [...modules, ...weights, ...nodes];
}

/** Connect a search field with a list of results.
 *
 * @param onFound receives all found items while typing; onChosen receives the chosen one.
 */
function showSearch(form, roots, onFound, onChosen) {
  const [field, count, list] = [form.querySelector("input"), form.querySelector("output"), form.querySelector(".results")];

  function entryOf(item) {
    const entry = element("li");
    const name = item.isModule ? item.path || item.label : item.name || item.outputs[0]?.name;
    const kind = item.isModule ? item.className : item.isWeight ? `weight ${item.type}` : item.operator;
    const model = roots.length > 1 ? ` in ${(item.isModule ? item : item.module ?? item.owner).model.name}` : "";
    entry.append(button("", name, () => onChosen(item)), element("small", "", ` ${kind}${model}`));
    return entry;
  }

  /** Append the next results to the list, and a button for those after them. */
  function listMore(found) {
    const entries = found.slice(0, MOST_FOUND).map(entryOf), others = found.slice(MOST_FOUND);
    list.append(...entries);
    if (!others.length) return entries;
    const more = element("li");
    more.append(button("", `${others.length} more`, () => {
      more.remove();
      const [first] = listMore(others);
      first.querySelector("button").focus();
    }));
    list.append(more);
    return entries;
  }

  function search() {
    const found = findItems(roots, field.value);
    count.textContent = field.value.trim() ? `${found.length} found` : "";
    list.replaceChildren();
    listMore(found);
    onFound(found);
  }

  field.addEventListener("input", search);
  form.addEventListener("submit", event => { event.preventDefault(); list.querySelector("button")?.click(); });
  form.addEventListener("keydown", event => {
    const buttons = [...list.querySelectorAll("button")], place = buttons.indexOf(document.activeElement);
    if (event.key === "Escape") { field.value = ""; search(); field.focus(); }
    if (!["ArrowDown", "ArrowUp"].includes(event.key)) return;
    event.preventDefault();
    (event.key === "ArrowDown" ? buttons[place + 1] : buttons[place - 1] ?? field)?.focus();
  });
  document.addEventListener("keydown", event => {
    if (event.key === "/" && !event.target.matches("input, select, textarea")) { event.preventDefault(); field.focus(); }
  });
}
