// Evaluations of a run: figures with their intervals over training, and each task before and after.
import { html } from "../html.js";
import { question, runPath, useData } from "../api.js";
import { Chart } from "../chart.js";
import { diverging, lineColour } from "../colour.js";
import { known, number, plural, seconds, signed } from "../format.js";
import { Empty } from "../legend.js";
import { address, go, setQuery, toStep } from "../router.js";

const interval = (figure) => (figure ? html`${number(figure.value, 3)} <span class="dim">${known(figure.low) ? `${number(figure.low, 3)} to ${number(figure.high, 3)}` : ""}</span>` : "–");

function ByTask({ run, tasks, steps, sources }) {
  const shown = [...tasks].sort((one, other) => (one.change ?? 0) - (other.change ?? 0));
  const link = (step) => (sources[`eval-${step}`] ? address(["run", run, "episodes"], { source: `eval-${step}` }) : "");
  return html`<h2>Before and after on the same task <span class="dim">most worsened first</span></h2><div class="scroll"><table class="before-after"><thead><tr><th>task</th>${steps.map((step) => html`<th key=${step} class="num">${link(step) ? html`<a href=${link(step)}>step ${step}</a>` : `step ${step}`}</th>`)}<th class="num">change</th></tr></thead>
    <tbody>${shown.map((row) => html`<tr key=${row.task} data-task=${row.task}><td class="cut mono">${row.task}${row.kind && html` <span class="tag">${row.kind}</span>`}</td>${steps.map((step) => {
      const value = row.values.find((one) => one.step === step);
      const text = value ? (known(value.reward) ? number(value.reward, 3) : plural(value.failures || 0, "failure")) : "–";
      const href = sources[`eval-${step}`] ? address(["run", run, "episodes"], { source: `eval-${step}`, task: row.task }) : "";
      return html`<td class="num" key=${step}>${href ? html`<a href=${href}>${text}</a>` : text}</td>`;
    })}<td class="num"><span class="token" style=${diverging(row.change || 0)}>${signed(row.change)}</span></td></tr>`)}</tbody></table></div>`;
}

export function EvaluationsView({ run, query }) {
  const { data, error } = useData(question(runPath(run, "evaluations")), run);
  if (error && !data) return html`<${Empty}>${error}<//>`;
  if (!data) return null;
  if (!data.rows.length) return html`<h1>Evaluations</h1><${Empty}>This run evaluated nothing. <code>--eval-every 10</code> measures the model every 10 steps on the tasks of <code>--eval-dataset</code>, or on the training tasks.<//>`;
  const names = [...new Set(data.rows.flatMap((row) => Object.keys(row.figures)))];
  const steps = data.rows.map((row) => row.step);
  const edges = query.steps === "all" || steps.length <= 6 ? steps : [...new Set([steps[0], steps.at(-1)])];
  const curve = (name) => [["value", "value"], ["low", "low"], ["high", "high"]].map(([part, text], index) => ({
    name: text, colour: index ? "#999999" : lineColour(0), points: data.rows.map((row) => ({ x: row.step, y: (row.figures[name] || {})[part], step: row.step })),
  }));
  return html`<h1>Evaluations <span class="dim">${plural(data.rows.length, "evaluation")}; grey: the interval</span></h1>
    <div class="charts">${names.slice(0, 4).map((name) => html`<${Chart} key=${name} title=${name} curves=${curve(name)} onPick=${(_, point) => point.step > 0 && go(toStep(run, point.step))} />`)}</div>
    <h2>Figures</h2><div class="scroll"><table><thead><tr><th class="num">step</th><th class="num">tasks</th><th class="num">episodes</th><th class="num">failed</th><th class="num">time</th>${names.map((name) => html`<th key=${name}>${name}</th>`)}</tr></thead>
    <tbody>${data.rows.map((row) => html`<tr key=${row.step}><td class="num">${row.step}</td><td class="num">${number(row.tasks)}</td><td class="num">${number(row.episodes)}</td><td class="num">${number(row.failed_episodes)}</td><td class="num">${seconds(row.seconds)}</td>
      ${names.map((name) => html`<td key=${name}>${interval(row.figures[name])}</td>`)}</tr>`)}</tbody></table></div>
    ${data.by_task.length ? html`${steps.length > 6 && html`<p><button type="button" onClick=${() => setQuery({ steps: query.steps === "all" ? "" : "all" })}>${query.steps === "all" ? "first and last only" : `all ${steps.length} evaluations`}</button></p>`}
      <${ByTask} run=${run} tasks=${data.by_task} steps=${edges} sources=${data.episodes || {}} />` : html`<${Empty}>The results of single tasks were not recorded.<//>`}`;
}
