// Two policies at the same observation.
import { ask, change, element, facts, later, latest, listen, subject, view } from "./state.js";
import { number, unpack } from "./numbers.js";
import { paint } from "./draw.js";
import { plane } from "./landscape.js";
import { described, drawLandscape, picture } from "./plane.js";

export const compared = { python: "" };

const run = latest(async (newer) => {
  if (view.tab !== "compare" || view.other === null) return;
  const message = { ...plane(), level: null, minimised: false, other: view.other, points: 64 }, found = await ask("compare", message);
  if (newer()) return;
  compared.python = found.python;
  const other = facts.subjects[view.other], look = { palette: view.palette, span: null, compact: true };
  const second = { ...picture(found.second, look), crossed: true };
  paint(element("second"), (brush) => drawLandscape(brush, second));
  element("second").setAttribute("aria-label", `${other.name}: ${described(second)}`);
  element("second-title").textContent = `Energy of ${other.name}`;
  const values = unpack(found.difference), most = Math.min(10, Math.max(1e-9, ...Array.from(values, Math.abs)));
  const difference = { ...picture({ ...found.first, density: null }, look), values, signed: most, held: null };
  paint(element("difference"), (brush) => drawLandscape(brush, difference));
  element("difference").setAttribute("aria-label", `Difference of the log densities, from ${number(-most, 2)} to ${number(most, 2)}; total variation ${number(found.distance)}.`);
  element("difference-title").textContent = `log p (${subject().name}) − log p (${other.name}), ±${number(most, 2)}`;
  const [mine, theirs] = [found.first.action, found.second.action].map((action) => action.map((value) => number(value, 6)).join(", "));
  element("compared").textContent = `${subject().name} chooses ${mine}; ${other.name} chooses ${theirs}. Purple: more likely under ${subject().name}; orange: under ${other.name}. Total variation distance of the two densities on this picture: ${number(found.distance, 6)}.`;
  element("compared").dataset.ready = String(Number(element("compared").dataset.ready || 0) + 1);
  weigh();
});

// log densities of both choices; they may take a moment, so they come when the view rests.
const weigh = later(latest(async (newer) => {
  if (view.tab !== "compare" || view.other === null) return;
  const { rows } = await ask("densities", { subject: view.subject, other: view.other, obs: view.obs });
  if (newer()) return;
  const names = [subject().name, facts.subjects[view.other].name];
  const cell = (name, words) => Object.assign(document.createElement(name), { textContent: words });
  const line = (kind, words) => { const row = document.createElement("tr"); row.append(cell("th", words[0]), ...words.slice(1).map((each) => cell(kind, each))); return row; };
  const value = (found) => (found === null ? "none" : number(found[0], 5) + (found[1] ? ` ± ${number(found[1], 2)}` : ""));
  element("densities").tBodies[0].replaceChildren(line("th", ["log p of what", ...names.map((name) => `under ${name}`)]), ...rows.map((row, i) => line("td", [`${names[i]} chooses`, ...row.map(value)])));
  element("densities").dataset.ready = String(Number(element("densities").dataset.ready || 0) + 1);
}), 400);

export function start() {
  element("other").onchange = () => change({ other: Number(element("other").value) });
  listen(["subject"], () => {
    const others = subject().comparable.filter((i) => i !== view.subject);
    element("other").replaceChildren(...others.map((i) => new Option(facts.subjects[i].name, i)));
    view.other = others.includes(view.other) ? view.other : others[0] ?? null;
    element("other").value = view.other ?? "";
    element("compared").textContent = others.length ? "" : "Name a second policy with the same columns: cebm studio RUN OTHER.";
    element("pair").hidden = !others.length;
  });
  listen(["obs", "axes", "principal", "tab", "subject", "other", "palette"], later(run, 60));
}
