// The observation: episodes, fresh roll-outs, sliders for columns, and the scene in which things can be dragged.
import { ask, change, element, latest, listen, subject, view } from "./state.js";
import { number } from "./numbers.js";
import { paint } from "./draw.js";
import { drawScene, plan, sceneOf } from "./scene.js";
import { afterDrawing, shown } from "./landscape.js";

let handle = 0, dragging = null, timer = 0;
const rolls = new Map();

const rolling = () => view.source === "rolled";
const steps = () => (rolling() ? rolls.get(`${view.subject} ${view.episode}`)?.steps : subject().episodes[view.episode]) ?? 1;

const fetchStep = latest(async () => {
  const { subject: index, source, episode } = view;
  if (source === "data" && !subject().episodes.length) return;
  if (rolling() && !rolls.has(`${index} ${episode}`)) {
    element("rolled").textContent = "The policy plays the episode …";
    rolls.set(`${index} ${episode}`, await ask("roll", { subject: index, episode }));
  }
  const step = Math.min(view.step, steps() - 1);
  const found = await ask("observation", { subject: index, source, episode, step });
  change({ obs: found.obs, step, demonstrated: source === "data" ? found.action : null });
  element("scene").dataset.ready = String(Number(element("scene").dataset.ready || 0) + 1);
});

// Another value in the newest frame; earlier frames move by as much.
export function moved(obs, frame, column, by) {
  return obs.map((value, i) => (i % frame === column ? value + by : value));
}

function go() {
  const most = rolling() ? 1e9 : subject().episodes.length - 1, episode = Math.min(most, Math.max(0, Math.round(Number(element("episode").value)) || 0));
  change({ source: element("source").value, episode, step: Number(element("step").value) });
  fetchStep();
}

// Steps through the episode by itself.
function walk() {
  clearInterval(timer);
  const walks = element("walk").getAttribute("aria-pressed") !== "true";
  element("walk").setAttribute("aria-pressed", String(walks)); element("walk").textContent = walks ? "Stop" : "Walk through";
  if (!walks) return;
  if (view.step >= steps() - 1) change({ step: 0 });
  timer = setInterval(() => {
    if (view.step >= steps() - 1) { walk(); return; }
    change({ step: view.step + 1 }); fetchStep();
  }, 200);
}

const newest = () => view.obs.slice(-subject().frame);

function setColumn(column, value) {
  change({ obs: moved(view.obs, subject().frame, column, value - newest()[column]), demonstrated: null });
}

function offer() {
  const { columns, frame, episodes, sketch, rolls: plays } = subject();
  element("columns").replaceChildren(...columns.map((column, i) => {
    const row = document.createElement("label"), name = document.createElement("span"), slider = document.createElement("input"), value = document.createElement("output");
    row.className = "column"; name.textContent = column.name; name.title = column.name;
    Object.assign(slider, { type: "range", min: column.low, max: column.high, step: (column.high - column.low) / 500 });
    slider.dataset.column = i; slider.oninput = () => setColumn(i, Number(slider.value));
    row.append(name, slider, value);
    return row;
  }));
  if (frame > columns.length) element("columns").append(Object.assign(document.createElement("p"), { className: "quiet", textContent: `${frame - columns.length} further columns have no slider.` }));
  element("episodes").hidden = !episodes.length && !plays;
  element("source").replaceChildren(...(episodes.length ? [new Option("the data", "data")] : []), ...(plays ? [new Option("a fresh roll-out", "rolled")] : []));
  element("scene").hidden = element("scene-help").hidden = !sketch;
  handle = 0;
}

// A roll-out is played when somebody asks for it.
export function begin() { if (!rolling()) fetchStep(); }

function write() {
  const now = newest(), row = rolling() && rolls.get(`${view.subject} ${view.episode}`)?.row;
  for (const slider of element("columns").querySelectorAll("input")) {
    const value = now[Number(slider.dataset.column)];
    if (document.activeElement !== slider) slider.value = value;
    slider.parentElement.querySelector("output").textContent = number(value, 4);
  }
  element("source").value = view.source; element("episode").value = view.episode;
  element("of").textContent = rolling() ? "any number" : `of ${subject().episodes.length}`;
  element("step").max = steps() - 1; element("step").value = view.step;
  element("step-value").textContent = view.step;
  element("rolled").textContent = row ? Object.entries(row).slice(0, 3).map(([name, value]) => `${name.replaceAll("_", " ")}: ${typeof value === "number" ? number(value) : value}`).join(", ") : "";
  draw();
}

function draw() {
  const { sketch } = subject(), canvas = element("scene");
  if (!sketch) return;
  const now = newest(), scene = sceneOf(sketch, now, shown.drawn && shown.key === JSON.stringify([view.subject, view.obs]) ? shown.drawn.action : null, handle);
  paint(canvas, (brush) => drawScene(brush, scene));
  const where = sketch.handles.map(({ name, columns }) => `${name} at ${columns[0].map((column) => number(now[column], 3)).join(", ")}`).join("; ");
  canvas.setAttribute("aria-label", `Scene: ${where}. Point ${handle + 1}, ${sketch.handles[handle].name}, is chosen.`);
}

function moveHandle(index, dx, dy) {
  const { sketch, frame } = subject();
  let obs = view.obs;
  for (const [x, y] of sketch.handles[index].columns) obs = moved(moved(obs, frame, x, dx), frame, y, dy);
  change({ obs, demonstrated: null });
}

function under(event) {
  const box = element("scene").getBoundingClientRect();
  return { ...plan(box.width, box.height, subject().sketch), x: event.clientX - box.left, y: event.clientY - box.top };
}

function grab(event) {
  const { to, from, x, y } = under(event), now = newest();
  let nearest = Infinity;
  subject().sketch.handles.forEach(({ columns }, i) => { for (const pair of columns) {
    const at = to(pair.map((column) => now[column])), away = Math.hypot(at[0] - x, at[1] - y);
    if (away < nearest - 1e-6) { nearest = away; handle = i; }
  } });
  if (nearest > 40) return;
  dragging = from(x, y); element("scene").setPointerCapture(event.pointerId); draw();
}

function drag(event) {
  if (!dragging) return;
  const { from, x, y } = under(event), place = from(x, y);
  moveHandle(handle, place[0] - dragging[0], place[1] - dragging[1]);
  dragging = place;
}

function key(event) {
  const { sketch } = subject(), arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
  const digit = Number(event.key);
  if (digit >= 1 && digit <= sketch.handles.length) { handle = digit - 1; draw(); event.preventDefault(); return; }
  if (!arrows[event.key]) return;
  event.preventDefault();
  const [dx, dy] = arrows[event.key], size = (sketch.high[0] - sketch.low[0]) * (event.shiftKey ? 0.05 : 0.01);
  moveHandle(handle, dx * size, dy * size * (sketch.downwards ? -1 : 1));
}

export function start() {
  element("episode").onchange = go; element("step").oninput = go; element("source").onchange = go; element("walk").onclick = walk;
  const scene = element("scene");
  scene.addEventListener("pointerdown", grab); scene.addEventListener("pointermove", drag);
  for (const name of ["pointerup", "pointercancel"]) scene.addEventListener(name, () => { dragging = null; });
  scene.addEventListener("keydown", key);
  listen(["subject"], offer);
  listen(["obs", "subject", "step", "episode", "source"], write);
  afterDrawing(draw);
}
