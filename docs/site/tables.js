// Tables with many rows are sorted by a click on a head, or Enter on it: numbers by value, a second time the other way.
// Tables with very many are searched as well.
const FEWEST_SORTED = 10;

function numberIn(text) {
  const found = text.replace(/,/g, "").match(/-?\d+(\.\d+)?(e[+-]?\d+)?/i);
  return found ? Number(found[0]) : NaN;
}

function makeSortable(table) {
  const body = table.tBodies[0], heads = [...(table.tHead?.rows[0]?.cells ?? [])];
  if (!body || body.rows.length < FEWEST_SORTED) return;
  heads.forEach((head, column) => {
    if (!head.textContent.trim()) return;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const isDescending = head.getAttribute("aria-sort") === "ascending", sign = isDescending ? -1 : 1;
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", isDescending ? "descending" : "ascending");
      const rows = [...body.rows].map(row => [row, row.cells[column].textContent.trim()]);
      const isNumber = rows.every(([, text]) => !/^[^\d-]*[a-z]{3}/i.test(text));
      rows.sort(([, left], [, right]) => {
        const [a, b] = [numberIn(left), numberIn(right)];
        return isNumber ? Number.isNaN(a) - Number.isNaN(b) || sign * (a - b)
          : sign * left.localeCompare(right, "en", { numeric: true });
      });
      body.append(...rows.map(([row]) => row));
    });
  });
}

// A page with a table of this many rows begins with a search in it and in tables with the same first head.
const FEWEST_SEARCHED = 100;
// The model types of this many matches are listed below the search, with the sections that have them.
const MOST_LISTED = 8;

function sectionOf(row) {
  let element = row.closest("table");
  while (element && element.tagName !== "H2") element = element.previousElementSibling ?? element.parentElement;
  return element;
}

function makeSearched(tables, heading) {
  const headOf = table => table.tHead?.rows[0]?.cells[0]?.textContent.trim();
  const long = tables.find(table => (table.tBodies[0]?.rows.length ?? 0) >= FEWEST_SEARCHED);
  if (!long || !heading) return;
  const rows = tables.filter(table => headOf(table) === headOf(long)).flatMap(table => [...table.tBodies[0].rows]);
  const label = document.createElement("label"), input = document.createElement("input");
  const count = document.createElement("output"), list = document.createElement("ul");
  label.className = "table-search";
  input.type = "search";
  input.placeholder = "a model type, such as llama";
  label.append("Is your model in it? ", input, count);
  list.className = "table-matches";
  heading.after(label, list);
  input.addEventListener("input", () => {
    const text = input.value.trim().toLowerCase(), sections = new Map();
    for (const row of rows) {
      const name = row.cells[0].textContent.trim();
      row.hidden = !row.textContent.toLowerCase().includes(text);
      if (text && name.toLowerCase().includes(text))
        sections.set(name, new Set(sections.get(name)).add(sectionOf(row)));
    }
    const found = rows.filter(row => !row.hidden).length;
    count.value = text ? `${found} of ${rows.length} rows` : "";
    // Shorter names are nearer to the text.
    const names = [...sections.keys()].sort((left, right) => left.length - right.length);
    list.replaceChildren(...names.slice(0, MOST_LISTED).map(name => {
      const entry = document.createElement("li"), code = document.createElement("code");
      code.append(name);
      entry.append(code, ": ");
      [...sections.get(name)].filter(Boolean).forEach((section, number) => {
        const link = document.createElement("a");
        link.href = `#${section.id}`;
        link.append(section.firstChild.textContent.trim());
        entry.append(number ? ", " : "", link);
      });
      return entry;
    }));
    if (names.length > MOST_LISTED) list.append(`and ${names.length - MOST_LISTED} more`);
  });
}

function makeWrapped() {
  // A command wraps, also in a block with its output, whose columns stay.
  for (const line of document.querySelectorAll(".md-typeset pre > code > [id^=__span]"))
    if (line.textContent.startsWith("$ ")) line.classList.add("command");
}

function makeScrolled() {
  // A code block that is wider than the page can be scrolled by keys.
  for (const code of document.querySelectorAll(".md-typeset pre > code"))
    if (code.scrollWidth > code.clientWidth) code.tabIndex = 0;
}

function prepare() {
  const tables = [...document.querySelectorAll(".md-typeset table")];
  makeSearched(tables, document.querySelector(".md-typeset h1"));
  for (const table of tables) makeSortable(table);
  makeWrapped();
  makeScrolled();
}

if (document.readyState === "loading") addEventListener("DOMContentLoaded", prepare);
else prepare();
