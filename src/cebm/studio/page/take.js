// Take away: a link, pictures, a page of the present view, and the lines of Python that make it.
import { ask, element, latest, listen, view } from "./state.js";
import { asSvg } from "./draw.js";
import { chartAsSvg } from "./curves.js";
import { afterDrawing, plane, shown } from "./landscape.js";
import { compared } from "./compare.js";

const PICTURES = { landscape: "Landscape", scene: "Scene", along: "Energies of the search", second: "Other policy", difference: "Difference", curves: "Training curve", moment: "Checkpoint" };

function save(name, content, type) {
  const link = document.createElement("a"), url = URL.createObjectURL(new Blob([content], { type }));
  link.href = url; link.download = `cebm-${name}`; link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

const chart = (id) => element(id).querySelector("svg.chart");

// Panels of other tabs are shown for the blink in which they are drawn.
function opened(id, act) {
  const panel = element(id).closest("[role=tabpanel]"), hidden = panel?.hidden;
  if (panel) panel.hidden = false;
  try { return act(); } finally { if (panel) panel.hidden = hidden; }
}

export function svgOf(id) {
  return opened(id, () => (element(id).tagName === "CANVAS" ? asSvg(element(id)) : chart(id) && chartAsSvg(chart(id))));
}

export async function pngOf(id) {
  const image = new Image(), size = opened(id, () => (chart(id) || element(id)).getBoundingClientRect()), ratio = 2;
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svgOf(id))}`;
  await image.decode();
  const canvas = Object.assign(document.createElement("canvas"), { width: Math.round(size.width * ratio), height: Math.round(size.height * ratio) });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => { canvas.toBlob(done, "image/png"); });
}

const drawnAlready = (id) => (element(id).tagName === "CANVAS" ? element(id).width > 1 && !element(id).hidden && element(id).dataset.drawn === "1" : chart(id) !== null);

function write() {
  const lines = { landscape: shown.python, search: shown.search?.python || "", compare: compared.python }[element("lines-of").value];
  element("lines").textContent = lines || "Open this panel first: the lines are those of its picture.";
  for (const button of element("images").querySelectorAll("button")) button.disabled = !drawnAlready(button.dataset.of);
}

function offer([id, name]) {
  const row = document.createElement("div"), words = document.createElement("span");
  row.className = "setting"; words.textContent = name;
  const button = (kind, act) => {
    const found = Object.assign(document.createElement("button"), { textContent: kind });
    found.dataset.of = id; found.setAttribute("aria-label", `${kind} of ${name}`); found.onclick = act;
    return found;
  };
  const both = document.createElement("span");
  both.append(button("PNG", async () => save(`${id}.png`, await pngOf(id), "image/png")), button("SVG", () => save(`${id}.svg`, svgOf(id), "image/svg+xml")));
  row.append(words, both);
  return row;
}

export function start() {
  element("images").append(...Object.entries(PICTURES).map(offer));
  element("lines-of").onchange = write;
  element("copy").onclick = async () => {
    await navigator.clipboard.writeText(element("link").value).then(() => { element("copy").textContent = "Copied"; }, () => element("link").select());
  };
  element("leaf").onclick = latest(async () => {
    const { html } = await ask("leaf", { ...plane(), way: view.way, values: view.values, seed: view.seed, palette: view.palette });
    save("view.html", html, "text/html");
    element("leaf").dataset.ready = String(Number(element("leaf").dataset.ready || 0) + 1);
  });
  listen(["tab", "obs", "axes", "level", "values", "way", "seed", "principal", "minimised"], () => view.tab === "take" && write());
  afterDrawing(() => view.tab === "take" && setTimeout(write, 0));
}
