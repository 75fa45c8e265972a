/** Return a new element with a class and a text; the text is never markup. */
function element(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}

/** Return a new button. */
function button(className, text, onClick) {
  const made = element("button", className, text);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

/** Return a list of labels with values; an empty value is omitted. */
function fieldList(rows) {
  const list = element("dl");
  for (const [label, value] of rows) {
    if (value === "" || value === null || value === undefined) continue;
    const cell = element("dd");
    cell.append(value);
    list.append(element("dt", "", label), cell);
  }
  return list;
}

/** Return the value of a name of a foreign file in an object of JSON: never a member that all objects have. */
const lookUp = (object, name) => object && Object.hasOwn(object, name) ? object[name] : undefined;

/** Fill a select element with values and their labels, and hide its label if there is no choice. */
function fillChoice(choice, options, value) {
  choice.replaceChildren(...options.map(([key, words]) => Object.assign(element("option", "", words), { value: key })));
  choice.value = value ?? options[0]?.[0] ?? "";
  choice.parentElement.hidden = options.length < 2;
}

/** Return a count with its noun. */
const countNoun = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

/** Return a number with a unit in powers of 1000, as the summary of a page: 1234567 → "1.23 M". */
function countWords(value) {
  const scale = [[1e12, " T"], [1e9, " B"], [1e6, " M"], [1e3, " k"]].find(([factor]) => Math.abs(value) >= factor);
  return scale ? `${Number((value / scale[0]).toPrecision(3))}${scale[1]}` : numberWords(value);
}

const INFINITE = 1e300;  // larger numbers stand for infinity, which JSON does not have

/** Return a number with three digits. */
function numberWords(value) {
  if (Math.abs(value) > INFINITE) return "∞";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return value && Math.abs(value) < 0.01 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}
