// A run under way: its curves, and the landscape of its checkpoints at the present observation. Files are read anew.
import { ask, change, element, latest, listen, number, subject, view } from "./state.js";
import { axes, brush, css, line, thumbnail } from "./draw.js";

let found = null, followed = true;

const look = latest(async () => {
  if (view.tab !== "training" || !subject().running) return;
  found = await ask("training", { subject: view.subject });
  const names = Object.keys(found.curves);
  if (!names.includes(view.curve)) view.curve = names.find((name) => name === "loss") || names[0] || null;
  element("curve").replaceChildren(...names.map((name) => new Option(name.replaceAll("_", " "), name)));
  element("curve").value = view.curve ?? "";
  const before = element("checkpoint").value;
  element("checkpoint").replaceChildren(...found.checkpoints.map((step) => new Option(`step ${step}`, step)));
  const gone = !found.checkpoints.includes(Number(before)), newest = String(found.checkpoints[0] ?? "");
  element("checkpoint").value = followed || gone ? newest : before;
  element("trained").textContent = `Step ${found.step.toLocaleString("en")} of ${found.steps.toLocaleString("en")}.` + (found.checkpoints.length ? "" : " No checkpoint yet.");
  curve();
  if (element("checkpoint").value !== before || !found.drawn) await moment();
});

const moment = async () => {
  const step = Number(element("checkpoint").value);
  if (!element("checkpoint").value) return;
  const drawn = await ask("moment", { subject: view.subject, step, obs: view.obs, axes: view.axes, level: view.level, points: 48 });
  thumbnail(element("moment"), drawn, subject(), view.palette, `Step ${step}: chosen ${drawn.action.slice(0, 3).map((value) => number(value, 3)).join(", ")}`);
};
const redraw = latest(async () => { if (view.tab === "training" && found) { curve(); await moment(); } });

function curve() {
  const { pen, width, height } = brush(element("curves")), points = found?.curves[view.curve];
  if (!points) return;
  const xs = points.map(([x]) => x), ys = points.map(([, y]) => y).filter(Number.isFinite), frame = { x: 48, y: 8, width: width - 58, height: height - 34 };
  let low = Math.min(...ys), high = Math.max(...ys);
  if (low === high) { low -= 1; high += 1; }
  const across = [xs[0], xs[xs.length - 1]];
  axes(pen, frame, across, [low, high], ["step", ""]);
  line(pen, points.map(([x, y]) => [frame.x + ((x - across[0]) / (across[1] - across[0])) * frame.width, frame.y + frame.height * (1 - (y - low) / (high - low))]), css("--accent"));
  element("curves").setAttribute("aria-label", `${view.curve} over steps ${across.join(" to ")}: from ${number(points[0][1])} to ${number(points[points.length - 1][1])}.`);
}

export function start() {
  element("curve").onchange = () => { change({ curve: element("curve").value }); curve(); };
  element("checkpoint").onchange = () => { followed = element("checkpoint").value === String(found.checkpoints[0]); redraw(); };
  listen(["tab", "subject"], () => { if (!subject().running) element("trained").textContent = "This policy is no run directory: there is no training to follow."; look(); });
  listen(["obs", "axes", "level", "palette"], redraw);
  setInterval(look, 3000);
}
