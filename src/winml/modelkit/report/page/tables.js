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
