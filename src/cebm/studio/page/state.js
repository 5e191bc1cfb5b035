// The view, the questions to the server, and the link that restores the view.
export const view = { subject: 0, obs: [], episode: 0, step: 0, axes: [0, 1], level: null, way: "own", values: {},
  principal: false, minimised: false, source: "data", demonstrated: null, seed: null, tab: "search", other: null, palette: "viridis", curve: null };
export const facts = { subjects: [] };
const listeners = [];

export const subject = () => facts.subjects[view.subject];
export const element = (id) => document.getElementById(id);

export function listen(keys, act) { listeners.push([keys, act]); }

export function change(patch) {
  Object.assign(view, patch);
  const keys = Object.keys(patch);
  for (const [wanted, act] of listeners) if (wanted.some((key) => keys.includes(key))) act(keys);
  remember();
}

export async function ask(question, message = {}) {
  const answer = await fetch(`api/${question}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(message) })
    .catch(() => { throw new Error("The studio does not answer; it may have ended."); });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

export function say(words) { element("error").textContent = words; }

// Runs `act` once at a time: calls that come meanwhile end in one further run, with the newest view.
export function latest(act) {
  let busy = false, again = false;
  return async function run() {
    if (busy) { again = true; return; }
    busy = true;
    try { do { again = false; await act(() => again); } while (again); say(""); }
    catch (error) { say(error.message); }
    finally { busy = false; if (again) { again = false; run(); } }
  };
}

export function later(act, milliseconds) {
  let timer = 0;
  return () => { clearTimeout(timer); timer = setTimeout(act, milliseconds); };
}

const write = later(() => {
  const kept = { ...view };
  if (kept.obs.length > 400) delete kept.obs;
  history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify(kept))}`);
  element("link").value = location.href; element("link").title = location.href;
}, 150);
function remember() { write(); }

// What the fragment says, as far as it fits these policies.
export function restored() {
  let kept = {};
  try { kept = JSON.parse(decodeURIComponent(location.hash.slice(1)) || "{}"); } catch { say("The link is damaged: this is the usual view."); }
  const found = {}, index = Number.isInteger(kept.subject) && facts.subjects[kept.subject] ? kept.subject : 0;
  const about = facts.subjects[index], dim = about.coordinates.length;
  found.subject = index;
  const numbers = (list) => Array.isArray(list) && list.every(Number.isFinite);
  found.obs = numbers(kept.obs) && kept.obs.length === about.obs.length ? kept.obs : about.obs;
  if (numbers(kept.axes) && kept.axes.length && kept.axes.every((axis) => about.coordinates[axis] !== undefined)) found.axes = kept.axes;
  else found.axes = dim > 1 ? [0, 1] : [0];
  for (const name of ["episode", "step"]) if (Number.isInteger(kept[name])) found[name] = kept[name];
  for (const name of ["principal", "minimised"]) if (kept[name] === true) found[name] = about.principal || name === "minimised";
  found.source = about.episodes.length && !(kept.source === "rolled" && about.rolls) ? "data" : about.rolls ? "rolled" : "data";
  if (numbers(kept.demonstrated) && kept.demonstrated.length === about.act * about.horizon) found.demonstrated = kept.demonstrated;
  if (typeof kept.curve === "string") found.curve = kept.curve;
  if (about.levels.includes(kept.level)) found.level = kept.level;
  if (about.ways[kept.way]) found.way = kept.way;
  if (kept.values && typeof kept.values === "object") found.values = kept.values;
  if (Number.isInteger(kept.seed)) found.seed = kept.seed;
  if (["search", "compare", "training", "take"].includes(kept.tab)) found.tab = kept.tab;
  if (["viridis", "cividis"].includes(kept.palette)) found.palette = kept.palette;
  if (facts.subjects[kept.other]) found.other = kept.other;
  return found;
}
