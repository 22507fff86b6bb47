// A run: what it is, signs that it does not learn, its curves.
import { html, useState } from "../html.js";
import { runPath, useData } from "../api.js";
import { Curves } from "../curves.js";
import { EvaluationsView } from "./evaluations.js";
import { moment, number, percent, plural, seconds } from "../format.js";
import { Empty, Facts } from "../legend.js";
import { TunedView } from "./tuned.js";
import { address, go, toEpisode, toStep } from "../router.js";

const ENDED = { killed: "It was killed.", failed: "It failed.", interrupted: "It was interrupted." };

function ledgerText(ledger) {
  if (!ledger || ledger.submitted === undefined || ledger.submitted === null) return "";
  return `${ledger.submitted} submitted = ${ledger.trained} trained + ${ledger.filtered} filtered + ${ledger.dropped} dropped + ${ledger.in_flight} in flight`;
}

const reasons = (counts) => Object.entries(counts || {}).map(([reason, count]) => `${count} ${reason}`).join(", ");

// Signs of the run itself; each leads to the last step, where its groups are.
function Signs({ run, info }) {
  return html`${(info.warnings || []).map(
    (sign) => html`<div class="note sign" key=${sign.name || sign.id}><b>${sign.text}</b><span class="dim">${sign.remedy}</span>
      ${info.steps > 0 && html`<a href=${toStep(run, info.step || info.steps)}>Look at the last step</a>`}</div>`,
  )}${(info.problems || []).map((problem) => html`<div class="note" key=${problem}>${problem}</div>`)}`;
}

// The verdict of `agentrl doctor`: causes that the records prove, the root cause first, or that the run learns, with advice. Replays are left to it.
function Verdict({ run, asked }) {
  const { data } = useData(asked ? runPath(run, "doctor") : null);
  if (!data) return null;
  const learns = data.outcome === "learning";
  return html`${!(data.verdicts || []).length && data.groups > 0 && html`<div class=${learns ? "note good verdict" : "note quiet verdict"}><b>${learns ? "This run learns." : "No fault was found."}</b> ${data.trend_text}
      ${(data.advice || []).map((one) => html`<div key=${one.id} class="advice"><span>${one.seen}.</span><span class="dim">${one.remedy}</span></div>`)}</div>`}${(data.verdicts || []).map(
    (cause) => html`<div class="note sign cause" key=${cause.id}><b>${cause.title}:</b> <span>${cause.seen}${cause.where && `: ${cause.where}`}</span><span class="dim">${cause.remedy}</span>
      ${cause.episodes.slice(0, 3).map((name) => html`<a key=${name} href=${toEpisode(run, name)}>Episode ${name}</a> `)}</div>`,
  )}`;
}

function Nothing({ run, info }) {
  if (info.episodes > 0) return html`<${Empty}>This run has no metrics; <a href=${address(["run", run, "episodes"])}>its ${plural(info.episodes, "episode")} can be read.</a><//>`;
  if (info.status === "running") return html`<${Empty}>No step has ended yet. The first curve appears here with the first step.<//>`;
  return html`<${Empty}>This run ended before its first step. The end of its output says why; <code>agentrl check ENV</code> plays its environment without a model.<//>`;
}

export function RunView({ run, info, query }) {
  if (info.kind === "tune") return html`<${TunedView} run=${run} info=${info} query=${query} />`;
  return html`<${TrainedView} run=${run} info=${info} query=${query} />`;
}

function TrainedView({ run, info, query }) {
  const { reward = {} } = info;
  const [drawn, setDrawn] = useState(false); // the verdict takes a while in a large run, and curves come first
  const measured = info.kind === "evaluation";
  const launch = (info.launches || []).at(-1);
  return html`<h1>${info.name} ${(info.tags || []).map((tag) => html`<span class="tag" key=${tag}>${tag}</span>`)}</h1>
    ${info.command && html`<pre class="command">${info.command}</pre>`}
    <${Facts} rows=${[
      ["steps", (info.num_steps || info.step > 0) && `${info.step}${info.num_steps ? ` of ${info.num_steps}` : ""}`],
      ["reward", !measured && reward && reward.last !== undefined && reward.last !== null && `${number(reward.first, 3)} in the first steps, ${number(reward.last, 3)} in the last, ${number(reward.best, 3)} in the best`],
      ["environment", info.agent], ["model", info.model], ["algorithm", !measured && info.algorithm],
      ["staleness", measured || info.staleness === null || info.staleness === undefined ? "" : info.staleness ? `up to ${info.staleness}` : "synchronous"],
      ["seed", info.num_steps && number(info.seed)], ["time", seconds(info.wall_s)], ["started", moment(info.started_s)],
      ["starts", (info.launches || []).length > 1 && `${info.launches.length}, the last on ${launch.host}`],
      ["groups", ledgerText(info.ledger)], ["filtered", reasons(info.filtered)], ["dropped", reasons(info.dropped)],
      ["recorded", info.episodes ? `${(info.account || {}).played ? `${info.account.episodes} of ${plural(info.account.played, "episode")}` : plural(info.episodes, "episode")}${info.recorded ? ` (--record ${info.recorded})${measured ? "" : `, ${info.annotations || 0} with figures of the learner`}` : ""}` : ""],
      ["idle", info.summary && info.summary.idle && `generator ${percent(info.summary.idle.generator)}, learner ${percent(info.summary.idle.learner)}`],
      ["stopped because", info.stop_reason],
    ]} />
    ${!measured && ENDED[info.status] && html`<p class="dim">${ENDED[info.status]} <code>agentrl train --resume ${info.path}</code> continues it from its last checkpoint, if it wrote one (<code>--save-every</code>).</p>`}
    ${info.kind === "run" && html`<${Verdict} run=${run} asked=${drawn || !info.steps} />`}
    <${Signs} run=${run} info=${info} />
    ${measured ? html`<${EvaluationsView} run=${run} query=${query} />` : info.steps > 0 ? html`<${Curves} runs=${[run]} version=${`${info.steps}`} query=${query} onDrawn=${() => setDrawn(true)} onPick=${(_, metric, step) => go(toStep(run, step, { metric }))} />` : html`<${Nothing} run=${run} info=${info} />`}`;
}
