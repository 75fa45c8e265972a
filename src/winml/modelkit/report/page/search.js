// --- Search of modules and nodes: a part of a name, a selector of the commands, or op:OPERATOR.

const MOST_FOUND = 60;

/** Return a test of modules and nodes; {module, node}, of which one may be null. */
function searchTest(text) {
  const words = text.trim();
  if (words.startsWith("op:")) {
    const wanted = new RegExp(`^(?:.*\\.)?${words.slice(3).replace(/[.+^${}()|[\]\\]/g, "\\$&").replaceAll("*", ".*").replaceAll("?", ".")}$`, "i");
    return { module: null, node: node => wanted.test(node.operator) };
  }
  if (/[*?]/.test(words)) return { module: selectorTest(words), node: null };
  const lower = words.toLowerCase(), has = name => name.toLowerCase().includes(lower);
  return {
    module: module => has(module.path) || has(module.className) || has(module.tag),
    node: node => has(node.name) || has(node.operator) || node.outputs.some(output => has(output.name)),
  };
}

/** Return the modules and nodes of models that a text finds, in the order of the graph. */
function findItems(roots, text) {
  if (!text.trim()) return [];
  const { module: isModule, node: isNode } = searchTest(text), modules = [], nodes = [];
  for (const root of roots)
    for (const module of modulesIn(root)) {
      if (isModule && !module.isGroup && isModule(module)) modules.push(module);
      if (isNode) nodes.push(...itemsOf(module).filter(item => !item.isModule && isNode(item)));
    }
  return [...modules, ...nodes];
}

/** Connect a search field with a list of results.
 *
 * @param onFound receives all found items while typing; onChosen receives the chosen one.
 */
function showSearch(form, roots, onFound, onChosen) {
  const [field, count, list] = [form.querySelector("input"), form.querySelector("output"), form.querySelector(".results")];

  function search() {
    const found = findItems(roots, field.value);
    count.textContent = field.value.trim() ? `${found.length} found` : "";
    list.replaceChildren(...found.slice(0, MOST_FOUND).map(item => {
      const entry = element("li"), several = roots.length > 1;
      const name = item.isModule ? item.path || item.label : item.name || item.outputs[0]?.name;
      const kind = item.isModule ? item.className : item.operator;
      const model = several ? ` in ${(item.isModule ? item : item.module).model.name}` : "";
      entry.append(button("", name, () => onChosen(item)), element("small", "", ` ${kind}${model}`));
      return entry;
    }));
    if (found.length > MOST_FOUND) list.append(element("li", "", `and ${found.length - MOST_FOUND} more`));
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
