// A view that was taken away: its landscape, with the candidates as they move, and its scene.
import { paint } from "./draw.js";
import { described, drawLandscape, fillLegend, journey, picture } from "./plane.js";
import { Player } from "./player.js";
import { drawScene, sceneOf } from "./scene.js";

const byId = (id) => document.getElementById(id), data = JSON.parse(byId("data").textContent);
const shown = picture(data.landscape, { palette: data.palette, span: null }), way = journey(data.moves);
const [button, range, output] = byId("player").children, player = new Player({ button, range, output }, 90);
byId("landscape").setAttribute("aria-label", described(shown));
fillLegend(byId("legend"), shown, way);
player.load(way.steps.length - 1, (at) => paint(byId("landscape"), (brush) => drawLandscape(brush, shown, way, at)), (frame) => `step ${way.steps[frame]}`);
player.show(way.steps.length - 1);
byId("scene-figure").hidden = !data.sketch;
if (data.sketch) paint(byId("scene"), (brush) => drawScene(brush, sceneOf(data.sketch, data.obs, data.landscape.action)));
document.documentElement.dataset.ready = "1";
