// A step: its groups and their rewards, what was left out and why, time in lanes, and the tokens behind a spike.
import { html } from "../html.js";
import { question, runPath, useData } from "../api.js";
import { number, percent, plural, seconds, signed } from "../format.js";
import { Histogram, binsOf, inBin } from "../histogram.js";
import { useKeys, useRowKeys } from "../keys.js";
import { Lanes } from "../lanes.js";
import { Empty, Facts, ScaleLegend } from "../legend.js";
import { GroupTable, rangeOf } from "../rows.js";
import { address, go, setQuery, toEpisode, toGroup, toStep } from "../router.js";
import { Spike } from "../spike.js";

const SHOWN = ["reward/mean", "score/mean", "group/zero_variance", "grad_norm", "entropy", "staleness/max", "mismatch/max", "off_policy/masked", "policy/clip_fraction", "tokens_per_s", "time/step_s"];

function MetricTable({ metrics, previous, all }) {
  const names = all ? Object.keys(metrics).sort() : SHOWN.filter((name) => name in metrics);
  return html`<table class="figures metrics"><tbody>${names.map(
    (name) => html`<tr key=${name}><td class="dim">${name}</td><td>${number(metrics[name])}</td><td class="dim">${previous && typeof previous[name] === "number" && typeof metrics[name] === "number" ? signed(metrics[name] - previous[name]) : ""}</td></tr>`,
  )}</tbody></table>`;
}

function Phases({ phases }) {
  const total = phases.reduce((sum, phase) => sum + phase.seconds, 0) || 1;
  return html`<table class="figures"><tbody>${phases.map(
    (phase) => html`<tr key=${phase.name}><td class="dim">${phase.name}</td><td><span class="bar" style=${{ width: `${(60 * phase.seconds) / total}px` }}></span></td><td>${seconds(phase.seconds)}</td></tr>`,
  )}</tbody></table>`;
}

function Left({ data }) {
  const count = (verdict) => data.others.filter((row) => row.verdict === verdict).length;
  const reasons = [...new Set(data.others.map((row) => row.reason).filter(Boolean))];
  return html`<p class="dim">${plural(count("filtered"), "group")} filtered, ${count("dropped")} dropped, ${count("retried")} retried${count("spare") ? `, ${count("spare")} oversampled` : ""} while this step was prepared.${reasons.length > 0 && ` Reasons: ${reasons.join("; ")}.`}</p>`;
}

export function StepView({ run, info, name, query }) {
  const { data, error } = useData(runPath(run, "step", name), run);
  const step = Number(name);
  const last = info.steps ? info.step || info.steps : step;
  useRowKeys("tr[data-group]");
  useKeys({
    ArrowLeft: ["step before", () => step > 1 && go(toStep(run, step - 1, query))],
    ArrowRight: ["step after", () => step < last && go(toStep(run, step + 1, query))],
  });
  if (error && !data) return html`<${Empty}>${error} <a href=${address(["run", run, "steps"])}>All steps</a><//>`;
  if (!data) return null;
  const rewards = data.rewards || [];
  const bins = binsOf(rewards);
  const chosen = query.bin !== undefined && bins[Number(query.bin)] ? Number(query.bin) : null;
  const keeps = (row) => chosen === null || (row.rewards || []).some((reward) => inBin(reward, bins[chosen]));
  const [low, high] = rangeOf([...data.groups, ...data.others].flatMap((row) => row.rewards || []));
  const groups = data.groups.filter(keeps);
  const others = data.others.filter(keeps);
  const href = (span) => (span.episode ? toEpisode(run, span.episode) : span.group !== null && span.group !== undefined ? toGroup(run, span.group) : "");
  return html`<h1>Step ${name} <span class="dim">${step > 0 ? `weights of version ${step - 1} become version ${step}` : "before the first step"}</span></h1>
    <p class="tools">${step > 1 && html`<a href=${toStep(run, step - 1, query)}>← step ${step - 1}</a>`}${step < last && html`<a href=${toStep(run, step + 1, query)}>step ${step + 1} →</a>`}
      <a href=${address(["run", run, "episodes"], { step: name })}>its recorded episodes</a></p>
    ${(data.notes || []).map((note) => html`<div class="note" key=${note}>${note}</div>`)}
    ${data.exact === false && html`<p class="dim">This run did not record which groups a step trained on; shown are the recorded groups that were begun with version ${step - 1}.</p>`}
    <div class="split"><div><h2>Rewards <span class="dim">${plural(rewards.length, "trained episode")}; a bar chooses the groups below</span></h2>
      ${bins.length ? html`<${Histogram} bins=${bins} chosen=${chosen} label="histogram of rewards" choose=${(index) => setQuery({ bin: index === null ? "" : index })} />` : html`<${Empty}>No reward of this step is recorded.<//>`}
      <h2>Groups <span class="dim">${chosen === null ? plural(data.groups.length, "group") : `${groups.length} of ${data.groups.length}`} trained on</span></h2>
      ${high > low && html`<${ScaleLegend} kind="sequential" label="reward" low=${number(low, 3)} high=${number(high, 3)} />`}
      ${groups.length ? html`<${GroupTable} run=${run} rows=${groups} low=${low} high=${high} />` : html`<${Empty}>${data.groups.length ? "No group has such a reward." : "No group of this step is recorded. Train with --record all to keep every episode."}<//>`}
      ${data.others.length > 0 && html`<h2>Left out <span class="dim">${plural(others.length, "group")}</span></h2><${Left} data=${data} /><${GroupTable} run=${run} rows=${others} low=${low} high=${high} />`}
      <h2>Time</h2>${data.lanes && data.lanes.spans.length ? html`<${Lanes} lanes=${data.lanes} href=${href} step=${Number(name)} note="Pale spans wait, or work on groups that another step trains or none. The line marks the end of the step before. A span leads to its group or episode." />` : html`<${Empty}>This run did not record when its parts worked.<//>`}
      <${Spike} run=${run} step=${name} query=${query} annotated=${info.annotations > 0} /></div>
    <aside class="side" aria-label="metrics"><h2>Metrics <span class="dim">and change since step ${step - 1}</span></h2><${MetricTable} metrics=${data.metrics} previous=${data.previous} all=${query.all === "1"} />
      <button type="button" onClick=${() => setQuery({ all: query.all === "1" ? "" : "1" })}>${query.all === "1" ? "fewer" : `all ${Object.keys(data.metrics).length}`}</button>
      ${data.phases && data.phases.length > 0 && html`<h2>Inside the learner</h2><${Phases} phases=${data.phases} />`}</aside></div>`;
}
