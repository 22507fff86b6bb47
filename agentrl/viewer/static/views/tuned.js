// A run on given data: its method and data, its losses, and the way to its recorded rows.
import { html } from "../html.js";
import { Curves } from "../curves.js";
import { large, moment, number, plural, seconds } from "../format.js";
import { Empty, Facts } from "../legend.js";
import { address } from "../router.js";

const rows = (counts) => (counts ? `${plural(counts.rows, "row")}, ${large(counts.trained)} of ${large(counts.tokens)} tokens trained${["dropped", "cut", "split"].filter((name) => counts[name]).map((name) => `, ${counts[name]} ${name}`).join("")}` : "");
const trend = (name, one) => one && `${name} ${number(one.first, 3)} → ${number(one.last, 3)}`;
const UNSAID = new Set(["step", "seconds", "best", "best_step"]);

// Figures of the first and the last evaluation beside each other.
function heldOut(found) {
  if (!found) return "";
  const names = Object.keys(found.first).filter((name) => !UNSAID.has(name) && name in found.last).slice(0, 4);
  return names.map((name) => trend(name, { first: found.first[name], last: found.last[name] })).join(", ");
}

export function TunedView({ run, info, query }) {
  const { summary = {}, config = {} } = info;
  const data = summary.data || {};
  const optim = config.optim || {};
  return html`<h1>${info.name} ${(info.tags || []).map((tag) => html`<span class="tag" key=${tag}>${tag}</span>`)}</h1>
    ${info.command && html`<pre class="command">${info.command}</pre>`}
    <${Facts} rows=${[
      ["steps", (info.num_steps || info.step > 0) && `${info.step}${info.num_steps ? ` of ${info.num_steps}` : ""}${optim.batch_size ? `, ${optim.batch_size} rows each` : ""}`],
      ["training", Object.entries(summary.train || {}).map(([name, one]) => trend(name, one)).join(", ") || (info.reward && trend("loss", info.reward))],
      ["held out", heldOut(summary.eval)], ["best", summary.eval && summary.eval.best && `${number(summary.eval.best.value)} after step ${summary.eval.best.step}`],
      ["data", info.data], ["rows", rows(data.train)], ["held-out rows", data.eval && data.eval.rows > 0 && rows(data.eval)], ["model", info.model],
      ["learning rate", number(optim.learning_rate)], ["loss", (config.method || {}).loss], ["beta", number((config.method || {}).beta)], ["seed", number(info.seed)], ["time", seconds(info.wall_s)], ["started", moment(info.started_s)],
    ]} />
    ${info.samples > 0 && html`<p><a href=${address(["run", run, "samples"])}>${plural(info.samples, "recorded row")} with the loss of each token before and after training</a></p>`}
    ${info.steps > 0 ? html`<${Curves} runs=${[run]} version=${`${info.steps}`} query=${query} heldOut=${true} />` : html`<${Empty}>${info.status === "running" ? "No step has ended yet. The first curve appears here with the first step." : "This run ended before its first step. The end of its output says why."}<//>`}`;
}
