// A run under way: its curves, and the landscape of its checkpoints at the present observation. Files are read anew.
import { ask, change, element, latest, listen, subject, view } from "./state.js";
import { number } from "./numbers.js";
import { readable } from "./curves.js";
import { paint } from "./draw.js";
import { plane } from "./landscape.js";
import { described, drawLandscape, picture } from "./plane.js";

let found = null, followed = true;

const look = latest(async () => {
  if (view.tab !== "training" || !subject().running) return;
  found = await ask("training", { subject: view.subject, curve: view.curve });
  const names = found.curves;
  element("curve").replaceChildren(...names.map((name) => new Option(name.replaceAll("_", " "), name)));
  element("curve").value = found.curve ?? "";
  element("curves").innerHTML = found.chart; // drawn and escaped by the server
  readable(element("curves"), element("tip"));
  const before = element("checkpoint").value;
  element("checkpoint").replaceChildren(...found.checkpoints.map((step) => new Option(`step ${step}`, step)));
  const gone = !found.checkpoints.includes(Number(before)), newest = String(found.checkpoints[0] ?? "");
  element("checkpoint").value = followed || gone ? newest : before;
  element("trained").textContent = `Step ${found.step.toLocaleString("en")} of ${found.steps.toLocaleString("en")}.` + (found.checkpoints.length ? "" : " No checkpoint yet.");
  if (element("checkpoint").value !== before) await moment();
});

const moment = async () => {
  const step = Number(element("checkpoint").value);
  if (!element("checkpoint").value) return;
  const drawn = await ask("moment", { ...plane(), step, points: 48 }), shown = picture(drawn, { palette: view.palette, span: null, compact: true });
  paint(element("moment"), (brush) => drawLandscape(brush, { ...shown, crossed: true }));
  element("moment").setAttribute("aria-label", `Step ${step}: ${described(shown)}`);
  element("moment-title").textContent = `Step ${step} chooses ${drawn.action.slice(0, 3).map((value) => number(value, 3)).join(", ")}`;
};
const redraw = latest(async () => { if (view.tab === "training" && found && subject().running) await moment(); });

export function start() {
  element("curve").onchange = () => { change({ curve: element("curve").value }); look(); };
  element("checkpoint").onchange = () => { followed = element("checkpoint").value === String(found.checkpoints[0]); redraw(); };
  listen(["tab", "subject"], () => {
    element("followed").hidden = !subject().running;
    element("trained").textContent = subject().running ? "" : "This policy is no run directory: there is no training to follow.";
    look();
  });
  listen(["subject"], () => { found = null; element("checkpoint").replaceChildren(); });
  listen(["tab", "obs", "axes", "level", "palette", "principal", "minimised"], redraw);
  setInterval(look, 3000);
}
