// The observation: episodes, sliders for columns, and the scene in which things can be dragged.
import { ask, change, element, later, latest, listen, number, subject, view } from "./state.js";
import { brush, cross, css, dot, line } from "./draw.js";
import { afterDrawing, shown } from "./landscape.js";

let chosenHandle = 0, dragging = null;

const fetchStep = latest(async () => {
  if (!subject().episodes.length) return;
  const found = await ask("observation", { subject: view.subject, episode: view.episode, step: view.step });
  shown.demonstrated = found.inside.length ? found.inside : null;
  change({ obs: found.obs });
});

// Another value in the newest frame; earlier frames move by as much.
export function moved(obs, frame, column, by) {
  return obs.map((value, i) => (i % frame === column ? value + by : value));
}

function go() {
  const lengths = subject().episodes, episode = Math.min(lengths.length - 1, Math.max(0, Math.round(Number(element("episode").value)) || 0));
  element("step").max = lengths[episode] - 1;
  change({ episode, step: Math.min(lengths[episode] - 1, Number(element("step").value)) });
  fetchStep();
}

function newest() { return view.obs.slice(-subject().frame); }

function setColumn(column, value) {
  const { frame } = subject();
  change({ obs: moved(view.obs, frame, column, value - newest()[column]) });
}

function offer() {
  const { columns, frame, episodes } = subject();
  element("columns").replaceChildren(...columns.map((column, i) => {
    const row = document.createElement("label"), name = document.createElement("span"), slider = document.createElement("input"), value = document.createElement("output");
    row.className = "column"; name.textContent = column.name; name.title = column.name;
    Object.assign(slider, { type: "range", min: column.low, max: column.high, step: (column.high - column.low) / 500 });
    slider.dataset.column = i; slider.oninput = () => setColumn(i, Number(slider.value));
    row.append(name, slider, value);
    return row;
  }));
  if (frame > columns.length) element("columns").append(Object.assign(document.createElement("p"), { className: "quiet", textContent: `${frame - columns.length} further columns have no slider.` }));
  element("episodes").hidden = !episodes.length;
  element("scene").hidden = element("scene-help").hidden = !subject().sketch;
  if (episodes.length) { element("episode").max = episodes.length - 1; element("episode").value = view.episode; element("step").max = (episodes[view.episode] || 1) - 1; element("step").value = view.step; }
  chosenHandle = 0;
}

function write() {
  const now = newest();
  for (const slider of element("columns").querySelectorAll("input")) {
    const value = now[Number(slider.dataset.column)];
    if (document.activeElement !== slider) slider.value = value;
    slider.parentElement.querySelector("output").textContent = number(value, 4);
  }
  element("step-value").textContent = view.step;
  drawScene();
}

// The scene's frame and the two maps between its units and pixels.
function plan(width, height) {
  const { sketch } = subject(), spans = [0, 1].map((axis) => sketch.high[axis] - sketch.low[axis]);
  const size = Math.min((width - 16) / spans[0], (height - 16) / spans[1]), x0 = (width - size * spans[0]) / 2, y0 = (height - size * spans[1]) / 2;
  const up = sketch.downwards;
  return {
    size,
    to: (x, y) => [x0 + (x - sketch.low[0]) * size, y0 + (up ? y - sketch.low[1] : sketch.high[1] - y) * size],
    from: (px, py) => [sketch.low[0] + (px - x0) / size, up ? sketch.low[1] + (py - y0) / size : sketch.high[1] - (py - y0) / size],
    box: [x0, y0, size * spans[0], size * spans[1]],
  };
}

const HUES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00"];

export function drawScene() {
  const { sketch } = subject(), canvas = element("scene");
  if (!sketch || canvas.hidden) return;
  const { pen, width, height } = brush(canvas), { to, size, box } = plan(width, height), now = newest();
  pen.strokeStyle = css("--line"); pen.strokeRect(...box);
  for (const [x, y, x2, y2] of sketch.walls) line(pen, [to(x, y), to(x2, y2)], css("--fore"), 3);
  sketch.handles.forEach((handle, i) => {
    const hue = HUES[i % HUES.length];
    for (const [x, y] of handle.columns) {
      const at = to(now[x], now[y]);
      if (handle.radius) { pen.beginPath(); pen.arc(...at, handle.radius * size, 0, 2 * Math.PI); pen.strokeStyle = hue; pen.lineWidth = 1.5; pen.stroke(); }
      dot(pen, ...at, i === chosenHandle ? 6 : 4.5, hue, css("--fore"));
    }
    const [x, y] = handle.columns[0].map((column) => now[column]), at = to(x, y);
    pen.fillStyle = css("--fore"); pen.textBaseline = "middle";
    const right = at[0] < width - 60; pen.textAlign = right ? "left" : "right";
    pen.fillText(`${i + 1} ${handle.name}`, at[0] + (right ? 9 : -9), at[1]);
  });
  if (sketch.places && shown.drawn) cross(pen, ...to(shown.drawn.action[0], shown.drawn.action[1]), 5);
  const where = sketch.handles.map((handle) => `${handle.name} at ${handle.columns[0].map((column) => number(now[column], 3)).join(", ")}`).join("; ");
  canvas.setAttribute("aria-label", `Scene: ${where}. Point ${chosenHandle + 1}, ${sketch.handles[chosenHandle].name}, is chosen.`);
}

function moveHandle(index, dx, dy) {
  const { sketch, frame } = subject();
  let obs = view.obs;
  for (const [x, y] of sketch.handles[index].columns) obs = moved(moved(obs, frame, x, dx), frame, y, dy);
  shown.demonstrated = null;
  change({ obs });
}

function grab(event) {
  const { sketch } = subject(), canvas = element("scene"), box = canvas.getBoundingClientRect(), { to, from } = plan(box.width, box.height), now = newest();
  const x = event.clientX - box.left, y = event.clientY - box.top;
  let nearest = Infinity;
  sketch.handles.forEach((handle, i) => { for (const pair of handle.columns) {
    const at = to(now[pair[0]], now[pair[1]]), away = Math.hypot(at[0] - x, at[1] - y);
    if (away < nearest - 1e-6) { nearest = away; chosenHandle = i; }
  } });
  if (nearest > 40) return;
  dragging = from(x, y); canvas.setPointerCapture(event.pointerId); drawScene();
}

function drag(event) {
  if (!dragging) return;
  const box = element("scene").getBoundingClientRect(), [x, y] = plan(box.width, box.height).from(event.clientX - box.left, event.clientY - box.top);
  moveHandle(chosenHandle, x - dragging[0], y - dragging[1]);
  dragging = [x, y];
}

function key(event) {
  const { sketch } = subject(), arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
  const digit = Number(event.key);
  if (digit >= 1 && digit <= sketch.handles.length) { chosenHandle = digit - 1; drawScene(); event.preventDefault(); return; }
  if (!arrows[event.key]) return;
  event.preventDefault();
  const [dx, dy] = arrows[event.key], size = (sketch.high[0] - sketch.low[0]) * (event.shiftKey ? 0.05 : 0.01);
  moveHandle(chosenHandle, dx * size, dy * size * (sketch.downwards ? -1 : 1));
}

export function start() {
  element("episode").onchange = go; element("step").oninput = go;
  const scene = element("scene");
  scene.addEventListener("pointerdown", grab); scene.addEventListener("pointermove", drag);
  for (const name of ["pointerup", "pointercancel"]) scene.addEventListener(name, () => { dragging = null; });
  scene.addEventListener("keydown", key);
  listen(["subject"], () => { shown.demonstrated = null; offer(); });
  listen(["obs", "subject", "step"], write);
  afterDrawing(drawScene);
  new ResizeObserver(later(() => subject() && drawScene(), 50)).observe(scene);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawScene);
}
