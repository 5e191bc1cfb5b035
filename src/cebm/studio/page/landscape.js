// The landscape, with the candidates of the search and their histograms in the same picture.
import { ask, change, element, later, latest, listen, number, subject, unpack, view } from "./state.js";
import { axes, brush, colour, cross, css, dot, energyShare, heatMap, line, ring, span } from "./draw.js";

const STRIP = 54;
export const shown = { drawn: null, values: null, python: "", search: null, frame: 0, demonstrated: null };
const redrawn = [];
export function afterDrawing(act) { redrawn.push(act); }

export const refresh = latest(async (newer) => {
  const began = performance.now(), key = JSON.stringify([view.subject, view.obs]);
  const message = { subject: view.subject, obs: view.obs, axes: view.axes, level: view.level };
  // The same observation has the same choice; another one is searched once, for the coarse picture.
  if (shown.key === key && shown.drawn) message.held = shown.drawn.held;
  const coarse = await ask("landscape", { ...message, points: 24 });
  take(coarse, key); draw();
  const first = performance.now() - began;
  if (newer()) return;
  const fine = await ask("landscape", { ...message, held: coarse.held, points: 96 });
  if (newer()) return;
  take(fine, key); shown.python = fine.python.replace(/, held=\[[^\]]*\]/, ""); draw();
  element("latency").textContent = `(${Math.round(first)} ms, fine ${Math.round(performance.now() - began)} ms)`;
  element("landscape").dataset.ready = String(Number(element("landscape").dataset.ready || 0) + 1);
});

function take(found, key) {
  shown.drawn = found; shown.values = unpack(found.energies); shown.key = key;
  element("chosen").textContent = found.action.map((value) => number(value, 6)).join(", ");
  element("energy").textContent = number(found.energy, 7);
  for (const act of redrawn) act();
}

// From a normalised coordinate to a share of the picture.
const share = (value) => (value / subject().limit + 1) / 2;

function scale(axis) {
  const { bounds, limit } = subject();
  return bounds ? [bounds[0][axis], bounds[1][axis]] : [-limit, limit];
}

export function draw() {
  const { drawn, values } = shown;
  if (!drawn) return;
  const canvas = element("landscape"), { pen, width, height } = brush(canvas), names = subject().coordinates;
  const frame = { x: 54, y: 6 + STRIP, width: width - 60 - STRIP, height: height - STRIP - 46 };
  if (drawn.axes.length === 1) drawCurve(pen, frame, drawn, values, names); else drawPlane(pen, frame, drawn, values, names);
  describe(canvas, drawn, values, names);
}

function drawPlane(pen, frame, drawn, values, names) {
  const side = Math.min(frame.width, frame.height), [low, high] = span(values);
  frame.x += (frame.width - side) / 2; frame.width = frame.height = side;
  heatMap(pen, frame, values, drawn.energies.shape[0], energyShare([low, high]), view.palette);
  axes(pen, frame, scale(drawn.axes[0]), scale(drawn.axes[1]), drawn.axes.map((axis) => names[axis]));
  const at = (x, y) => [frame.x + share(x) * side, frame.y + (1 - share(y)) * side];
  pen.save(); pen.beginPath(); pen.rect(frame.x, frame.y, side, side); pen.clip();
  places(pen, frame, drawn);
  const state = candidates();
  if (state) for (const [x, y] of state) dot(pen, ...at(x, y), 2.6, "#ff9f1a", "#00000099");
  if (shown.demonstrated) ring(pen, ...at(...drawn.axes.map((axis) => shown.demonstrated[axis])), 8);
  cross(pen, ...at(...drawn.axes.map((axis) => drawn.held[axis])));
  pen.restore();
  histogram(pen, { x: frame.x, y: frame.y - STRIP, width: side, height: STRIP - 6 }, 0, false);
  histogram(pen, { x: frame.x + side + 6, y: frame.y, width: STRIP - 6, height: side }, 1, true);
}

function drawCurve(pen, frame, drawn, values, names) {
  const points = values.length, [low, high] = span(values), top = high + 0.05 * (high - low);
  const at = (x, energy) => [frame.x + share(x) * frame.width, frame.y + frame.height * (1 - Math.min(1, (energy - low) / (top - low)))];
  const place = (i) => drawn.places[0] + (i / (points - 1)) * (drawn.places[1] - drawn.places[0]);
  const density = unpack(drawn.density), most = Math.max(...density) || 1;
  pen.fillStyle = css("--grid"); pen.beginPath(); pen.moveTo(frame.x, frame.y + frame.height);
  density.forEach((value, i) => pen.lineTo(frame.x + share(place(i)) * frame.width, frame.y + frame.height * (1 - 0.9 * value / most)));
  pen.lineTo(frame.x + frame.width, frame.y + frame.height); pen.fill();
  line(pen, Array.from(values, (value, i) => at(place(i), value)), css("--accent"), 2);
  axes(pen, frame, scale(drawn.axes[0]), [low, top], [names[drawn.axes[0]], "energy"]);
  const state = candidates(), heights = state && unpack(shown.search.energies), each = state && shown.search.energies.shape[1];
  if (state) state.forEach(([x], i) => dot(pen, ...at(x, heights[shown.frame * each + i]), 2.6, css("--warm")));
  if (shown.demonstrated) { const x = at(shown.demonstrated[drawn.axes[0]], low)[0]; line(pen, [[x, frame.y], [x, frame.y + frame.height]], css("--quiet"), 1); }
  cross(pen, ...at(drawn.held[drawn.axes[0]], drawn.energy ?? top), 6);
  histogram(pen, { x: frame.x, y: frame.y - STRIP, width: frame.width, height: STRIP - 6 }, 0, false);
}

function fits() { return shown.search && view.tab === "search" && JSON.stringify(shown.search.axes) === JSON.stringify(view.axes); }

function candidates() {
  if (!fits()) return null;
  const [, count, dims] = shown.search.states.shape, all = shown.search.unpacked, from = shown.frame * count * dims;
  return Array.from({ length: count }, (_, i) => Array.from(all.subarray(from + i * dims, from + (i + 1) * dims)));
}

// The candidates' histogram as bars, the exact density as a line.
function histogram(pen, frame, axis, upright) {
  if (!fits() || !shown.search.histograms[axis]) return;
  const bins = shown.search.shares[axis].shape[1], bars = shown.search.histograms[axis].subarray(shown.frame * bins, (shown.frame + 1) * bins);
  const exact = shown.search.exact[axis] ? unpack(shown.search.exact[axis]) : null;
  const most = Math.max(1.6 * Math.max(...(exact || [0])), exact ? 0 : Math.max(...bars), 1e-9);
  const height = (value) => Math.min(1, value / most) * (upright ? frame.width : frame.height);
  pen.fillStyle = css("--warm");
  bars.forEach((value, i) => {
    const along = (upright ? frame.height : frame.width) / bins, size = height(value);
    if (upright) pen.fillRect(frame.x, frame.y + frame.height - (i + 1) * along, size, along - 0.5);
    else pen.fillRect(frame.x + i * along, frame.y + frame.height - size, along - 0.5, size);
  });
  if (!exact) return;
  line(pen, Array.from(exact, (value, i) => {
    const place = (i + 0.5) / bins, size = height(value);
    return upright ? [frame.x + size, frame.y + frame.height * (1 - place)] : [frame.x + frame.width * place, frame.y + frame.height - size];
  }), css("--fore"), 1.5);
}

// Goals and agent, where an action is a place in the task's plane.
function places(pen, frame, drawn) {
  const { sketch, bounds, frame: width } = subject();
  if (!sketch || !sketch.places || !bounds || drawn.axes[0] !== 0 || drawn.axes[1] !== 1) return;
  const newest = view.obs.slice(-width), at = (axis, value) => (value - bounds[0][axis]) / (bounds[1][axis] - bounds[0][axis]);
  pen.font = "11px system-ui, sans-serif"; pen.textAlign = "left"; pen.textBaseline = "middle";
  for (const handle of sketch.handles) {
    const [x, y] = handle.columns[0].map((column, axis) => at(axis, newest[column]));
    const px = frame.x + x * frame.width, py = frame.y + (1 - y) * frame.height;
    pen.setLineDash([4, 3]); ring(pen, px, py, Math.max(4, handle.radius / (bounds[1][0] - bounds[0][0]) * frame.width)); pen.setLineDash([]);
    pen.lineWidth = 3; pen.strokeStyle = "#000"; pen.strokeText(handle.name, px + 12, py); pen.fillStyle = "#fff"; pen.fillText(handle.name, px + 12, py);
  }
}

function describe(canvas, drawn, values, names) {
  const [low, high] = span(values), shownNames = drawn.axes.map((axis) => names[axis]).join(" and ");
  const others = names.length > drawn.axes.length ? " Other coordinates are held at the chosen action." : "";
  canvas.setAttribute("aria-label", `Energy over ${shownNames}, from ${number(low)} to ${number(high)}. Chosen action ${element("chosen").textContent}, its energy ${element("energy").textContent}.`);
  const key = drawn.axes.length === 1 ? "Line: energy. Grey: density exp(−E)/Z." : `Dark: low energy, likely (${number(low)}). Bright: high (${number(high)} and above).`;
  const ringed = shown.demonstrated ? " Ring: demonstrated action." : "";
  const moving = fits() ? " Orange: candidates and their histogram" + (shown.search.exact.length ? "; line beside it: the density." : ".") : "";
  element("legend").textContent = `${key} Cross: chosen action.${ringed}${moving}${others}`;
}

export function start() {
  const choose = () => {
    const across = Number(element("axis-across").value), up = element("axis-up").value;
    change({ axes: up === "" || Number(up) === across ? [across] : [across, Number(up)] });
  };
  element("axis-across").onchange = choose; element("axis-up").onchange = choose;
  element("palette").onchange = () => change({ palette: element("palette").value });
  element("level").oninput = () => { const at = Number(element("level").value); change({ level: at ? subject().levels[subject().levels.length - at] : null }); };
  listen(["subject"], offer);
  listen(["subject", "obs", "axes", "level"], refresh);
  listen(["level", "axes", "subject", "palette"], write);
  listen(["palette", "tab"], draw);
  new ResizeObserver(later(draw, 50)).observe(element("landscape"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

function offer() {
  const names = subject().coordinates, option = (name, i) => new Option(name, i);
  element("axis-across").replaceChildren(...names.map(option));
  element("axis-up").replaceChildren(new Option("(a curve)", ""), ...names.map(option));
  element("levels").hidden = !subject().levels.length;
  element("level").max = subject().levels.length;
}

function write() {
  element("axis-across").value = view.axes[0]; element("axis-up").value = view.axes.length > 1 ? view.axes[1] : "";
  element("palette").value = view.palette;
  const { levels } = subject(), at = levels.indexOf(view.level);
  element("level").value = at < 0 ? 0 : levels.length - at;
  element("level-value").textContent = view.level === null ? "as it is" : number(view.level, 3);
}
