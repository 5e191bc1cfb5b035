// The search: settings as controls, candidates in motion, what follows from where they end.
import { ask, change, element, later, latest, listen, number, subject, unpack, view } from "./state.js";
import { draw, shown } from "./landscape.js";

let timer = 0;

const message = () => ({ subject: view.subject, obs: view.obs, axes: view.axes, level: view.level, way: view.way, values: view.values, seed: view.seed });

const run = latest(async (newer) => {
  if (view.tab !== "search" && view.tab !== "take") return;
  const axes = [...view.axes], found = await ask("search", message());
  if (newer()) return;
  found.axes = axes; found.unpacked = unpack(found.states); found.histograms = found.shares.map(unpack);
  shown.search = found;
  element("frame").max = found.steps.length - 1;
  show(found.steps.length - 1);
  element("words").textContent = found.words;
  element("words").dataset.ready = String(Number(element("words").dataset.ready || 0) + 1);
});
const soon = later(run, 250);

function show(frame) {
  const found = shown.search;
  shown.frame = frame; element("frame").value = frame;
  element("frame-value").textContent = `step ${found.steps[frame]}`;
  element("frame").setAttribute("aria-valuetext", `after step ${found.steps[frame]}`);
  const rows = [["Candidates", found.candidates], ["Mean energy", found.mean[frame]], ["Lowest energy", found.lowest[frame]],
    ["Mean size of the gradient", found.gradients[frame]], ["Moved since the last state", found.changed[frame]], ["Spread (standard deviation)", found.spread[frame]]];
  element("along").tBodies[0].replaceChildren(...rows.map(([name, value]) => {
    const row = document.createElement("tr");
    row.append(Object.assign(document.createElement("td"), { textContent: name }), Object.assign(document.createElement("td"), { textContent: number(value, 6) }));
    return row;
  }));
  draw();
}

function play() {
  clearInterval(timer);
  const playing = element("play").getAttribute("aria-pressed") !== "true";
  element("play").setAttribute("aria-pressed", String(playing)); element("play").textContent = playing ? "Pause" : "Play";
  if (!playing || !shown.search) return;
  const last = shown.search.steps.length - 1;
  if (shown.frame >= last) show(0);
  timer = setInterval(() => {
    if (shown.frame >= shown.search.steps.length - 1) { play(); return; }
    show(shown.frame + 1);
  }, 90);
}

function control(each) {
  const row = document.createElement("label"), name = document.createElement("span");
  row.className = "setting"; row.title = each.about; name.textContent = each.path.replaceAll(".", " › ").replaceAll("_", " ");
  const now = each.path in view.values ? view.values[each.path] : each.value;
  let input;
  if (each.kind === "choice") { input = document.createElement("select"); input.append(...each.choices.map((choice) => new Option(choice, choice))); input.value = now; }
  else { input = document.createElement("input"); input.type = { bool: "checkbox", str: "text" }[each.kind] || "number"; input.step = each.kind === "int" ? 1 : "any"; }
  if (each.kind === "bool") input.checked = now; else if (each.kind !== "choice") input.value = now === null ? "" : now;
  if (each.optional) input.placeholder = "none";
  input.dataset.path = each.path;
  input.onchange = () => {
    const value = each.kind === "bool" ? input.checked : each.kind === "int" || each.kind === "float" ? (input.value === "" ? null : Number(input.value)) : input.value;
    const values = { ...view.values, [each.path]: value };
    // The two formulations have different noise: the correct one has no σ.
    if (each.path.endsWith("formulation")) values[each.path.replace("formulation", "noise")] = value === "correct" ? 1 : 0.1;
    change({ values });
  };
  row.append(name, input);
  return row;
}

function offer() {
  for (const way of document.querySelectorAll("[name=way]")) way.checked = way.value === view.way;
  const controls = subject().ways[view.way];
  element("settings").replaceChildren(...controls.map(control));
  if (!controls.length) element("settings").textContent = "This way to act has no settings.";
  element("seed").value = view.seed ?? "";
  element("certificate").textContent = "";
}

export function start() {
  for (const way of document.querySelectorAll("[name=way]")) way.onchange = () => change({ way: way.value, values: {} });
  element("play").onclick = play;
  element("frame").oninput = () => shown.search && show(Number(element("frame").value));
  element("seed").onchange = () => change({ seed: element("seed").value === "" ? null : Math.max(0, Math.round(Number(element("seed").value))) });
  element("anew").onclick = () => change({ seed: Math.floor(Math.random() * 1e6) });
  element("reset").onclick = () => change({ values: {}, seed: null });
  element("certify").onclick = latest(async () => {
    element("certificate").textContent = "The certificate runs the sampler on two known densities …";
    element("certificate").textContent = (await ask("certificate", message())).words;
  });
  listen(["subject", "way", "values", "seed"], offer);
  listen(["subject", "way", "values", "seed", "axes", "tab"], run);
  listen(["subject"], () => { shown.search = null; });
  listen(["obs"], soon);
}
