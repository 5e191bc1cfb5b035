// The landscape at the present observation, with the candidates of the search on it.
import { ask, change, element, latest, listen, subject, view } from "./state.js";
import { number } from "./numbers.js";
import { PALETTES, paint } from "./draw.js";
import { described, drawLandscape, fillLegend, picture } from "./plane.js";

export const shown = { picture: null, python: "", search: null, at: 0, drawn: null };
const redrawn = [];
export function afterDrawing(act) { redrawn.push(act); }

// What a question about a picture says of it.
export const plane = () => ({ subject: view.subject, obs: view.obs, axes: view.axes, level: view.level, principal: view.principal, minimised: view.minimised });

export const refresh = latest(async (newer) => {
  const began = performance.now(), key = JSON.stringify([view.subject, view.obs]), message = { ...plane(), demonstrated: view.demonstrated };
  // The same observation has the same choice; another one is searched once, for the coarse picture.
  if (shown.key === key && shown.drawn) message.held = shown.drawn.inside;
  // A minimum at each point takes longer than an energy, so its first picture has fewer.
  const coarse = await ask("landscape", { ...message, points: view.minimised ? 12 : 24 });
  take(coarse, key);
  const first = performance.now() - began;
  if (newer()) return;
  const fine = await ask("landscape", { ...message, held: coarse.inside, points: 96 });
  if (newer()) return;
  take(fine, key); shown.python = fine.python.replace(/, held=\[[^\]]*\]/, "");
  element("latency").textContent = `(${Math.round(first)} ms, fine ${Math.round(performance.now() - began)} ms)`;
  element("landscape").dataset.ready = String(Number(element("landscape").dataset.ready || 0) + 1);
});

function take(found, key) {
  Object.assign(shown, { drawn: found, key, picture: picture(found, { palette: view.palette, span: null }) });
  element("chosen").textContent = found.action.map((value) => number(value, 6)).join(", ");
  element("energy").textContent = number(found.energy, 7);
  for (const act of redrawn) act();
  draw();
}

// The search's candidates, while its panel is open and they are of this picture's coordinates.
function way() {
  const kept = JSON.stringify([view.axes, view.principal]);
  return shown.search && view.tab === "search" && shown.search.key === kept ? shown.search : null;
}

export function draw() {
  if (!shown.picture) return;
  const canvas = element("landscape");
  shown.picture.palette = view.palette;
  paint(canvas, (brush) => drawLandscape(brush, shown.picture, way(), shown.at));
  canvas.setAttribute("aria-label", described(shown.picture));
  fillLegend(element("legend"), shown.picture, way());
  const others = subject().coordinates.length > shown.picture.axes.length;
  element("slice").textContent = !others ? "" : shown.picture.minimised ? "At each point the other coordinates are where the energy was found to be lowest." : "The other coordinates are held at the chosen action.";
}

export function start() {
  const choose = () => {
    const across = Number(element("axis-across").value), up = element("axis-up").value;
    change({ axes: up === "" || Number(up) === across ? [across] : [across, Number(up)] });
  };
  element("axis-across").onchange = choose; element("axis-up").onchange = choose;
  element("palette").append(...PALETTES.map((name) => new Option(name, name)));
  element("palette").onchange = () => change({ palette: element("palette").value });
  element("principal").onchange = () => change({ principal: element("principal").checked });
  element("minimised").onchange = () => change({ minimised: element("minimised").checked });
  element("level").oninput = () => { const at = Number(element("level").value); change({ level: at ? subject().levels[subject().levels.length - at] : null }); };
  listen(["subject", "axes"], offer);
  listen(["subject", "obs", "axes", "level", "principal", "minimised", "demonstrated"], refresh);
  listen(["level", "axes", "subject", "palette", "principal", "minimised"], write);
  listen(["palette", "tab"], draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

function offer() {
  const names = subject().coordinates, option = (name, i) => new Option(name, i);
  element("axis-across").replaceChildren(...names.map(option));
  element("axis-up").replaceChildren(new Option("(a curve)", ""), ...names.map(option));
  element("levels").hidden = !subject().levels.length;
  element("level").max = subject().levels.length;
  element("planes").hidden = names.length < 2 || (names.length === 2 && view.axes.length === 2);
  element("principal").parentElement.hidden = !subject().principal;
}

function write() {
  element("axis-across").value = view.axes[0]; element("axis-up").value = view.axes.length > 1 ? view.axes[1] : "";
  element("palette").value = view.palette;
  element("principal").checked = view.principal; element("minimised").checked = view.minimised;
  for (const id of ["axis-across", "axis-up"]) element(id).disabled = view.principal;
  const { levels } = subject(), at = levels.indexOf(view.level);
  element("level").value = at < 0 ? 0 : levels.length - at;
  element("level-value").textContent = view.level === null ? "as it is" : number(view.level, 3);
}
