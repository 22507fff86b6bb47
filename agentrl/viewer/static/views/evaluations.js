// Evaluations of a run: figures with their intervals over training, and each task before and after.
import { html } from "../html.js";
import { question, runPath, useData } from "../api.js";
import { Chart } from "../chart.js";
import { diverging, lineColour } from "../colour.js";
import { known, number, plural, seconds, signed } from "../format.js";
import { Empty } from "../legend.js";
import { address, go, setQuery, toStep } from "../router.js";

const interval = (figure) => (figure ? html`${number(figure.value, 3)} <span class="dim">${known(figure.low) ? `${number(figure.low, 3)} to ${number(figure.high, 3)}` : ""}</span>` : "–");

function ByTask({ run, tasks, evaluations, sources }) {
  const shown = [...tasks].sort((one, other) => (one.change ?? 0) - (other.change ?? 0));
  const link = ({ source }, query) => (sources[source] ? address(["run", run, "episodes"], { source, ...query }) : "");
  const several = evaluations.length > 1;
  const readable = (row) => row.values.some((value) => known(value.group));
  return html`<h2>${several ? "Before and after on the same task" : "Tasks"} <span class="dim">${several ? "most worsened first" : ""}</span></h2><div class="scroll" role="group" aria-label="table" tabindex="0"><table class="before-after"><thead><tr><th>task</th>${evaluations.map((one) => html`<th key=${one.step} class="num">${link(one) ? html`<a href=${link(one)}>${one.label}</a>` : one.label}</th>`)}${several && html`<th class="num">change</th>`}</tr></thead>
    <tbody>${shown.map((row) => html`<tr key=${row.task} data-task=${row.task}><td class="cut mono">${readable(row) ? html`<a href=${address(["run", run, "evaluated", row.task])}>${row.task}</a>` : row.task}${row.kind && html` <span class="tag">${row.kind}</span>`}</td>${evaluations.map((one) => {
      const value = row.values.find((found) => found.step === one.step);
      const text = value ? (known(value.reward) ? number(value.reward, 3) : plural(value.failures || 0, "failure")) : "–";
      const href = link(one, { task: row.task });
      return html`<td class="num" key=${one.step}>${href ? html`<a href=${href}>${text}</a>` : text}</td>`;
    })}${several && html`<td class="num"><span class="token" style=${diverging(row.change || 0)}>${signed(row.change)}</span></td>`}</tr>`)}</tbody></table></div>`;
}

export function EvaluationsView({ run, query }) {
  const { data, error } = useData(question(runPath(run, "evaluations")), run);
  if (error && !data) return html`<${Empty}>${error}<//>`;
  if (!data) return null;
  if (!data.rows.length) return html`<h1>Evaluations</h1><${Empty}>This run evaluated nothing. <code>--eval-every 10</code> measures the model every 10 steps: on <code>--eval-prompts</code>, on the environment's <code>eval_tasks()</code>, or on <code>--eval-size</code> tasks that are held out.<//>`;
  const names = [...new Set(data.rows.flatMap((row) => Object.keys(row.figures)))];
  const steps = data.rows.map((row) => row.step);
  const edges = query.steps === "all" || steps.length <= 6 ? data.rows : [data.rows[0], data.rows.at(-1)];
  const differences = Object.keys(data.differences || {}).length > 0;
  const curve = (name) => [["value", "value"], ["low", "low"], ["high", "high"]].map(([part, text], index) => ({
    name: text, colour: index ? "#999999" : lineColour(0), points: data.rows.map((row) => ({ x: row.step, y: (row.figures[name] || {})[part], step: row.step })),
  }));
  return html`<h1>${data.measured ? "Evaluation" : html`Evaluations <span class="dim">${plural(data.rows.length, "evaluation")}; grey: the interval</span>`}</h1>
    ${!data.measured && html`<div class="charts">${names.slice(0, 4).map((name) => html`<${Chart} key=${name} title=${name} curves=${curve(name)} onPick=${(_, point) => point.step > 0 && go(toStep(run, point.step))} />`)}</div>`}
    <h2>Figures <span class="dim">with intervals of 95%</span></h2><div class="scroll" role="group" aria-label="table" tabindex="0"><table class="measured"><thead><tr><th>${data.measured ? "model" : "at"}</th><th class="num">tasks</th><th class="num">episodes</th><th class="num">failed</th><th class="num">time</th>${names.map((name) => html`<th key=${name}>${name}</th>`)}</tr></thead>
    <tbody>${data.rows.map((row) => html`<tr key=${row.step}><td>${row.label}</td><td class="num">${number(row.tasks)}</td><td class="num">${number(row.episodes)}</td><td class="num">${number(row.failed_episodes)}</td><td class="num">${seconds(row.seconds)}</td>
      ${names.map((name) => html`<td key=${name}>${interval(row.figures[name])}</td>`)}</tr>`)}
    ${differences && html`<tr><td colspan="5">difference, model − baseline</td>${names.map((name) => html`<td key=${name}>${interval(data.differences[name])}</td>`)}</tr>`}</tbody></table></div>
    ${data.by_task.length ? html`${steps.length > 6 && html`<p><button type="button" onClick=${() => setQuery({ steps: query.steps === "all" ? "" : "all" })}>${query.steps === "all" ? "first and last only" : `all ${steps.length} evaluations`}</button></p>`}
      <${ByTask} run=${run} tasks=${data.by_task} evaluations=${edges} sources=${data.episodes || {}} />` : html`<${Empty}>The results of single tasks were not recorded.<//>`}`;
}
