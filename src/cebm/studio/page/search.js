// The search: settings as controls, candidates in motion, what follows from where they end.
import { ask, change, element, later, latest, listen, subject, view } from "./state.js";
import { number } from "./numbers.js";
import { readable } from "./curves.js";
import { draw, plane, shown } from "./landscape.js";
import { journey } from "./plane.js";
import { Player } from "./player.js";

let player = null;

const message = () => ({ ...plane(), way: view.way, values: view.values, seed: view.seed });

const run = latest(async (newer) => {
  if (view.tab !== "search" && view.tab !== "take") return;
  const key = JSON.stringify([view.axes, view.principal]), found = await ask("search", message());
  if (newer()) return;
  shown.search = { ...journey(found), key };
  player.load(found.steps.length - 1, show, (frame) => `step ${found.steps[frame]}`);
  player.show(found.steps.length - 1);
  element("words").textContent = found.words;
  element("along").innerHTML = found.chart; // drawn and escaped by the server
  readable(element("along"), element("tip"));
  element("words").dataset.ready = String(Number(element("words").dataset.ready || 0) + 1);
});
const soon = later(run, 250);

function show(at) {
  const found = shown.search, frame = Math.floor(at + 1e-6);
  if (!found) return;
  shown.at = at;
  const rows = [["Candidates", found.candidates], ["Mean energy", found.mean[frame]], ["Lowest energy", found.lowest[frame]],
    ["Mean size of the gradient", found.gradients[frame]], ["Moved (acceptance)", found.changed[frame]], ["Spread (std. deviation)", found.spread[frame]]];
  element("numbers-along").tBodies[0].replaceChildren(...rows.map(([name, value]) => {
    const row = document.createElement("tr");
    row.append(Object.assign(document.createElement("td"), { textContent: name }), Object.assign(document.createElement("td"), { textContent: number(value, 6) }));
    return row;
  }));
  draw();
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

// What was found for another policy goes at once, and not when this one's search has ended.
function clear() {
  shown.search = null;
  element("words").textContent = "";
  element("numbers-along").tBodies[0].replaceChildren(); element("along").replaceChildren();
}

export function start() {
  player = new Player({ button: element("play"), range: element("frame"), output: element("frame-value") }, 90);
  for (const way of document.querySelectorAll("[name=way]")) way.onchange = () => change({ way: way.value, values: {} });
  element("seed").onchange = () => change({ seed: element("seed").value === "" ? null : Math.max(0, Math.round(Number(element("seed").value))) });
  element("anew").onclick = () => change({ seed: Math.floor(Math.random() * 1e6) });
  element("reset").onclick = () => change({ values: {}, seed: null });
  element("certify").onclick = latest(async () => {
    element("certificate").textContent = "The certificate runs the sampler on two known densities …";
    element("certificate").textContent = (await ask("certificate", message())).words;
  });
  listen(["subject", "way", "values", "seed"], offer);
  listen(["subject", "way", "values", "seed", "axes", "principal", "tab"], run);
  listen(["subject"], clear);
  listen(["obs"], soon);
}
