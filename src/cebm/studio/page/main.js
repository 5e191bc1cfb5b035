// Puts the panels together.
import { ask, change, element, facts, listen, restored, say, subject, view } from "./state.js";
import * as landscape from "./landscape.js";
import * as search from "./search.js";
import * as observation from "./observation.js";
import * as compare from "./compare.js";
import * as training from "./training.js";
import * as take from "./take.js";

function tabs() {
  const buttons = [...document.querySelectorAll("[role=tab]")];
  for (const button of buttons) {
    button.onclick = () => change({ tab: button.dataset.tab });
    button.onkeydown = (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      const next = buttons[(buttons.indexOf(button) + by + buttons.length) % buttons.length];
      next.focus(); next.click();
    };
  }
  listen(["tab"], () => {
    for (const button of buttons) {
      const mine = button.dataset.tab === view.tab;
      button.setAttribute("aria-selected", String(mine)); button.tabIndex = mine ? 0 : -1;
      element(button.getAttribute("aria-controls")).hidden = !mine;
    }
  });
}

async function begin() {
  facts.subjects = (await ask("hello")).subjects;
  element("subject").replaceChildren(...facts.subjects.map((each, i) => new Option(each.name, i)));
  element("subject").onchange = () => {
    const index = Number(element("subject").value), next = facts.subjects[index], before = subject();
    const alike = next.comparable.includes(view.subject), dim = next.coordinates.length;
    const same = alike && before.coordinates.length === dim;
    change({ subject: index, obs: alike ? view.obs : next.obs, axes: same ? view.axes : dim > 1 ? [0, 1] : [0], level: null, principal: false, way: "own", values: {}, source: next.episodes.length ? "data" : "rolled", demonstrated: null, episode: alike ? view.episode : 0, step: alike ? view.step : 0 });
  };
  tabs();
  listen(["subject"], () => {
    const about = subject(), chunk = about.horizon > 1 ? `, ${about.horizon} actions at once` : "";
    element("subject").value = view.subject;
    element("about").textContent = `${about.energy}, ${about.acting}${about.task ? `, ${about.task}` : ""}: ${about.history} × ${about.frame} columns seen, ${about.act} done${chunk}`;
  });
  for (const panel of [landscape, observation, search, compare, training, take]) panel.start();
  const found = restored();
  Object.assign(view, found);
  change({ ...view });
  if (!location.hash.includes("obs")) observation.begin();
  document.documentElement.dataset.ready = "1";
}

begin().catch((error) => say(error.message));
