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

// A page with a table of this many rows begins with a search in such tables.
const FEWEST_SEARCHED = 100;

function makeSearched(tables, heading) {
  const rows = tables.filter(table => (table.tBodies[0]?.rows.length ?? 0) >= FEWEST_SEARCHED)
    .flatMap(table => [...table.tBodies[0].rows]);
  if (!rows.length || !heading) return;
  const label = document.createElement("label"), input = document.createElement("input"), count = document.createElement("output");
  label.className = "table-search";
  input.type = "search";
  input.placeholder = "a model type, such as llama";
  label.append("Find in the tables ", input, count);
  heading.after(label);
  input.addEventListener("input", () => {
    const text = input.value.trim().toLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(text);
    const found = rows.filter(row => !row.hidden).length;
    count.value = text ? `${found} of ${rows.length} rows` : "";
  });
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
  makeScrolled();
}

if (document.readyState === "loading") addEventListener("DOMContentLoaded", prepare);
else prepare();
