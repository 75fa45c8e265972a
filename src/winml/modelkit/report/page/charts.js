// --- Charts of modules in a report: each has one size and at most one shade.

/** Return the modules of a chart as nodes; a node without a name if there are several outermost modules. */
function treeOf(data) {
  const nodes = data.boxes.map(([parent, label, kind, words, size, shade, isMarked, lines]) => ({
    parent, label, words, lines, isMarked: !!isMarked, children: [],
    kinds: [kind], sizes: [size], shades: data.shades ? [shade] : [],
  }));
  const roots = nodes.filter(node => node.parent < 0);
  for (const node of nodes) if (node.parent >= 0) nodes[node.parent].children.push(node);
  return roots.length === 1 ? roots[0] : {
    label: "all", words: "", lines: [], isMarked: false, children: roots,
    kinds: [""], sizes: [0], shades: data.shades ? [null] : [],
  };
}

/** Filter the table of the page by the name of a module. */
function showRows(node) {
  filter.value = node.search ?? node.lines[0];
  select();
  filter.scrollIntoView({ block: "start" });
  filter.focus({ preventScroll: true });
}

function showCharts() {
  const charts = [...document.querySelectorAll(".boxes:not(.of-view)")].map(chart => {
    const data = JSON.parse(chart.querySelector("script").textContent);
    return [chart, data, treeOf(data)];
  });
  const colours = classColours(charts.map(([, , root]) => root));
  for (const [chart, data, root] of charts) {
    const write = value => `${numberWords(value)} ${data.unit}`.trim();
    const shades = data.shades ? [{ ...data.shades, write: numberWords }] : [];
    showIcicle(chart, {
      root, shades, sizes: [{ title: data.sizeTitle, write }], categories: [data.kindTitle],
      start: data.byClass ? "kind 0" : "shade 0",
    }, classesIn(root, colours), { rowsOf: filter ? showRows : null });
  }
}

showCharts();
