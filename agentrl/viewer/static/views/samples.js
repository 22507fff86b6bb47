// Recorded rows of training on given data: what is trained of each, and the loss of its tokens before and after.
import { html, useMemo, useState } from "../html.js";
import { runPath, useData } from "../api.js";
import { TokenFigures } from "../figures.js";
import { known, number, plural, signed } from "../format.js";
import { useKeys, useRowKeys } from "../keys.js";
import { Empty, Facts } from "../legend.js";
import { address, go, setQuery, toSample } from "../router.js";
import { useDark } from "../theme.js";
import { FIGURES, TokenLegend, coloursOf, painter } from "../tokens.js";
import { Pieces } from "../turn.js";

const NONE = html`<${Empty}>This run recorded no rows. The commands for given data write up to <code>--record-rows</code> of them into rows.jsonl.<//>`;

const fromTo = (before, after) => (known(after) ? html`${number(before, 3)} <span class="dim">→</span> ${number(after, 3)}` : number(before, 3));
const between = (before, after) => (known(before) && known(after) ? signed(after - before) : "–");

// "before the first step and after step 12", as far as the run has come.
const times = (steps) => (steps.length > 1 ? `before the first step and after step ${steps.at(-1)}` : steps.length ? "before the first step; those after the last appear when the run ends" : "");

function Row({ run, row, rewards }) {
  const first = row.answers[0] || {};
  return html`<tr data-sample=${row.row}><td><a href=${toSample(run, row.row)}>row ${row.row + 1}</a></td><td><span class="tag">${row.part}</span>${typeof row.label === "boolean" && html`<span class="tag">${row.label ? "desirable" : "undesirable"}</span>`}</td>
    <td class="cut long mono" dir="auto">${row.prompt}</td><td class="cut long mono" dir="auto">${row.answers.length > 1 ? row.answers.map((answer) => html`<div key=${answer.name}><span class="dim">${answer.name}</span> ${answer.text}</div>`) : first.text}</td>
    <td class="num" data-label="tokens">${row.tokens}</td><td class="num" data-label="trained">${row.trained}</td><td class="num" data-label="loss before">${number(row.loss_before, 3)}</td><td class="num" data-label="after">${number(row.loss_after, 3)}</td><td class="num" data-label="change">${between(row.loss_before, row.loss_after)}</td>
    ${rewards && html`<td class="num" data-label="reward">${row.rewards.map((reward, index) => html`<div key=${index}>${fromTo(reward.before, reward.after)}</div>`)}</td>`}</tr>`;
}

export function SamplesView({ run }) {
  const { data, error } = useData(runPath(run, "samples"), run);
  useRowKeys("tr[data-sample]");
  if (error && !data) return html`<${Empty}>${error}<//>`;
  if (!data) return null;
  if (!data.rows.length) return NONE;
  const rewards = data.rows.some((row) => row.rewards.some((reward) => known(reward.before)));
  return html`<h1>Rows <span class="dim">${data.rows.length} of the data, with their losses ${times(data.steps)}</span></h1>
    <div class="scroll" role="group" aria-label="table" tabindex="0"><table class="samples stack"><thead><tr><th>row</th><th>of</th><th>prompt</th><th>trained</th><th class="num">tokens</th><th class="num">trained</th><th class="num">loss before</th><th class="num">after</th><th class="num">change</th>${rewards && html`<th class="num">reward</th>`}</tr></thead>
    <tbody>${data.rows.map((row) => html`<${Row} key=${row.row} run=${run} row=${row} rewards=${rewards} />`)}</tbody></table></div>`;
}

function Sequence({ turn, paint, cells, chosen, mask }) {
  const { before, after } = turn.rewards;
  return html`<section class="turn"><header>${turn.name && html`<b>${turn.name}</b>`}<span class="dim">${plural(turn.tokens.ids.length, "token")}, ${turn.trained} trained</span>
      ${known(before) && html`<span>reward <b>${fromTo(before, after)}</b></span>`}</header>
    <div class="message"><${Pieces} turn=${turn} paint=${paint} cells=${cells} chosen=${chosen} find="" mask=${mask} quiet=${true} /></div></section>`;
}

export function SampleView({ run, name, query }) {
  const { data, error } = useData(runPath(run, "sample", name), run);
  const dark = useDark();
  const [hover, setHover] = useState(null);
  const fields = data ? data.fields : [];
  const colour = query.colour || ["loss_change", "logprob_change", "loss_before", "logprob_before"].find((field) => fields.includes(field)) || "mask";
  const paint = useMemo(() => (data ? painter(data, colour, dark) : () => ({})), [data, colour, dark]);
  const step = (by) => {
    const [turn, token] = chosen ? [chosen.turn, chosen.token + by] : [0, 0];
    if (data && data.turns[turn] && token >= 0 && token < data.turns[turn].tokens.ids.length) setQuery({ turn, token });
  };
  const chosen = query.token === undefined ? null : { turn: Number(query.turn || 0), token: Number(query.token) };
  useKeys({
    ArrowRight: ["next token", () => step(1)], ArrowLeft: ["token before", () => step(-1)],
    n: ["next row", () => data && known(data.next) && go(toSample(run, data.next, query))], p: ["row before", () => data && known(data.previous) && go(toSample(run, data.previous, query))],
    m: ["text or tokens", () => setQuery({ form: query.form === "tokens" ? "" : "tokens" })],
  });
  if (error && !data) return html`<${Empty}>${error} <a href=${address(["run", run, "samples"])}>All recorded rows</a><//>`;
  if (!data) return null;
  const at = (event) => {
    const found = event.target.closest("[data-token]");
    return found ? { turn: Number(found.dataset.turn), token: Number(found.dataset.token) } : null;
  };
  const form = query.form === "tokens" ? "tokens" : "text";
  return html`<div class="split"><div><h1>Row ${data.row + 1} <span class="tag">${data.part}</span>${typeof data.label === "boolean" && html`<span class="tag">${data.label ? "desirable" : "undesirable"}</span>`}</h1>
      <${Facts} rows=${[["loss", known(data.loss_before) && fromTo(data.loss_before, data.loss_after)], ["change", known(data.loss_after) && between(data.loss_before, data.loss_after)], ["margin", known(data.margin) && number(data.margin)], ["images", data.images > 0 && data.images], ["measured", times(data.steps)]]} />
      <div class="tools"><span role="group" aria-label="form">${["text", "tokens"].map((each) => html`<button type="button" key=${each} class=${form === each ? "on" : ""} aria-pressed=${form === each} onClick=${() => setQuery({ form: each === "text" ? "" : each })}>${each === "text" ? "Text" : "Tokens"}</button>`)}</span>
        <label>colour by <select aria-label="colour by" value=${colour} onChange=${(event) => setQuery({ colour: event.target.value })}>${coloursOf(data).map((each) => html`<option key=${each} value=${each}>${each === "mask" ? "mask" : FIGURES[each].text}</option>`)}</select></label>
        <${TokenLegend} episode=${data} name=${colour} /></div>
      <div class=${data.turns.length > 1 ? "pair" : ""} onMouseOver=${(event) => setHover(at(event))} onMouseLeave=${() => setHover(null)} onClick=${(event) => at(event) && setQuery(at(event))}>${data.turns.map(
        (turn) => html`<${Sequence} key=${turn.turn} turn=${turn} paint=${paint} cells=${form === "tokens"} chosen=${chosen && chosen.turn === turn.turn ? chosen.token : -1} mask=${colour === "mask"} />`,
      )}</div><p class="dim">Pale text is not trained: the model reads it.</p></div>
    <aside class="side token-side" aria-label="token"><p class="tools">${known(data.previous) && html`<a href=${toSample(run, data.previous, query)}>← row ${data.previous + 1}</a>`}${known(data.next) && html`<a href=${toSample(run, data.next, query)}>row ${data.next + 1} →</a>`}</p>
      <h2>Token</h2><${TokenFigures} episode=${data} place=${hover || chosen} /></aside></div>`;
}
