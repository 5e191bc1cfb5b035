// Take away: a link, pictures, and the lines of Python that make them.
import { element, listen, view } from "./state.js";
import { afterDrawing, shown } from "./landscape.js";
import { compared } from "./compare.js";

const PICTURES = { landscape: "Landscape", scene: "Scene", second: "Other policy", difference: "Difference", curves: "Training curve", moment: "Checkpoint" };

function save(id) {
  element(id).toBlob((blob) => {
    const link = document.createElement("a"), url = URL.createObjectURL(blob);
    link.href = url; link.download = `cebm-${id}.png`; link.click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }, "image/png");
}

function write() {
  const lines = { landscape: shown.python, search: shown.search?.python || "", compare: compared.python }[element("lines-of").value];
  element("lines").textContent = lines || "Open this panel first: the lines are those of its picture.";
  for (const button of element("images").querySelectorAll("button")) {
    const canvas = element(button.dataset.of);
    button.disabled = !(canvas.width > 300 || canvas.height > 150) && !canvas.getClientRects().length;
  }
}

export function start() {
  element("images").append(...Object.entries(PICTURES).map(([id, name]) => {
    const button = Object.assign(document.createElement("button"), { textContent: name });
    button.dataset.of = id; button.onclick = () => save(id);
    return button;
  }));
  element("lines-of").onchange = write;
  element("copy").onclick = async () => {
    await navigator.clipboard.writeText(element("link").value).then(() => { element("copy").textContent = "Copied"; }, () => element("link").select());
  };
  listen(["tab", "obs", "axes", "level", "values", "way", "seed"], () => view.tab === "take" && write());
  afterDrawing(() => view.tab === "take" && setTimeout(write, 0));
}
