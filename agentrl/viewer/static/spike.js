// The tokens behind a spike of a metric: the most extreme ones of a step, each with its surroundings.
import { html } from "./html.js";
import { question, runPath, useData } from "./api.js";
import { brief, number, plural, spelled } from "./format.js";
import { Empty } from "./legend.js";
import { setQuery, toEpisode } from "./router.js";

const BY = [["mismatch", "difference of engine and learner"], ["ratio", "ratio of the loss"], ["weight", "off-policy weight"], ["loss", "share of the loss"], ["entropy", "entropy"], ["advantage", "advantage"], ["logprob", "log-probability"]];
const GUESS = [[/mismatch/, "mismatch"], [/^rho|off_policy|ess/, "weight"], [/ratio|clip|kl/, "ratio"], [/entropy/, "entropy"], [/advantage|return/, "advantage"], [/loss|grad/, "loss"]];

const guessed = (metric) => (GUESS.find(([pattern]) => pattern.test(metric || "")) || [null, "logprob"])[1];

function TokenRow({ run, row }) {
  return html`<tr data-token><td class="num"><b>${number(row.value, 4)}</b></td>
    <td class="mono"><span class="dim">${brief((row.before || "").slice(-40), 40)}</span><a href=${toEpisode(run, row.episode, { turn: row.turn, token: row.token })}><mark class="token cell">${spelled(row.text || "")}</mark></a><span class="dim">${brief(row.after || "", 30)}</span></td>
    <td>${row.episode}</td><td class="num">${number(row.logprob, 3)}</td><td class="num">${number(row.learner, 3)}</td><td class="num">${number(row.ratio, 3)}</td><td class="num">${number(row.weight, 3)}</td>
    <td class="num">${number(row.advantage, 3)}</td><td class="num">${number(row.entropy, 3)}</td><td class="num">${number(row.staleness)}</td><td>${row.mask}</td></tr>`;
}

export function Spike({ run, step, query, annotated }) {
  const by = query.by || guessed(query.metric);
  const { data, error } = useData(annotated ? question(runPath(run, "step", step, "tokens"), { by, limit: 20 }) : null, run);
  const head = html`<h2 id="spike">Tokens behind ${query.metric ? html`<span class="mono">${query.metric}</span>` : "a spike"}</h2>`;
  if (!annotated) return html`${head}<${Empty}>The learner's figures of single tokens were not recorded in this run. They are for recorded episodes of runs that were trained with annotations, which is the default.<//>`;
  return html`${head}<p class="tools"><label>most extreme by <select aria-label="order of tokens" value=${by} onChange=${(event) => setQuery({ by: event.target.value })}>${BY.map(([value, text]) => html`<option key=${value} value=${value}>${text}</option>`)}</select></label>
    ${data && html`<span class="dim">${data.description}; of ${plural(data.tokens, "token")} in ${plural(data.episodes, "recorded episode")}</span>`}</p>
    ${error && !data && html`<${Empty}>${error}<//>`}
    ${data && (data.rows.length ? html`<div class="scroll" role="group" aria-label="table" tabindex="0"><table class="spike"><thead><tr><th class="num">value</th><th>token</th><th>episode</th><th class="num">engine</th><th class="num">learner</th><th class="num">ratio</th><th class="num">weight</th><th class="num">advantage</th><th class="num">entropy</th><th class="num">staleness</th><th>mask</th></tr></thead>
      <tbody>${data.rows.map((row, index) => html`<${TokenRow} key=${index} run=${run} row=${row} />`)}</tbody></table></div>` : html`<${Empty}>No recorded token of this step has this figure.<//>`)}`;
}
