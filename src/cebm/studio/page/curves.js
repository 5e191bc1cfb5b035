// Charts come drawn from the server, as SVG. This reads them under the pointer, and writes one with its colours in it.
export function readable(root, tip) {
  for (const chart of root.querySelectorAll("svg.chart[data-hover]")) {
    const hover = JSON.parse(chart.dataset.hover), cursor = chart.querySelector(".cursor");
    chart.addEventListener("pointermove", (event) => {
      const box = chart.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width;
      let near = 0;
      hover.x.forEach((at, i) => { if (Math.abs(at - x) < Math.abs(hover.x[near] - x)) near = i; });
      cursor.setAttribute("transform", `translate(${hover.x[near]} 0)`);
      cursor.style.visibility = "visible";
      tip.replaceChildren(row(`step ${hover.at[near]}`), ...hover.lines.filter((each) => hover.at[near] in each.text).map((each) => row(`${each.label}  ${each.text[hover.at[near]]}`, each.colour)));
      tip.style.display = "block";
      tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
      tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
    });
    chart.addEventListener("pointerleave", () => { tip.style.display = "none"; cursor.style.visibility = "hidden"; });
  }
}

function row(words, colour) {
  const found = document.createElement("div"), swatch = document.createElement("i");
  if (colour) { swatch.style.background = colour; found.append(swatch); }
  found.append(words);
  return found;
}

// Where a player stands, in a chart whose curves go over its steps.
export function pointAt(chart, step) {
  const hover = JSON.parse(chart.dataset.hover), cursor = chart.querySelector(".cursor");
  cursor.style.visibility = "visible";
  cursor.setAttribute("transform", `translate(${hover.x[Math.min(step, hover.x.length - 1)]} 0)`);
}

const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "visibility", "font-size", "font-family", "text-anchor"];

export function chartAsSvg(chart) {
  const copy = chart.cloneNode(true), all = [chart, ...chart.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((node, i) => {
    const style = getComputedStyle(all[i]);
    for (const name of STYLES) node.setAttribute(name, style.getPropertyValue(name));
  });
  copy.removeAttribute("data-hover");
  const back = document.createElementNS(chart.namespaceURI, "rect");
  for (const [name, value] of Object.entries({ width: "100%", height: "100%", fill: getComputedStyle(document.documentElement).getPropertyValue("--paper").trim() })) back.setAttribute(name, value);
  copy.prepend(back);
  return new XMLSerializer().serializeToString(copy);
}
