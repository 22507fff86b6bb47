// Search in the recorded episodes: prompts, answers and errors.
import { html, useEffect, useState } from "../html.js";
import { ask, question, runPath } from "../api.js";
import { plural } from "../format.js";
import { useRowKeys } from "../keys.js";
import { Empty } from "../legend.js";
import { toEpisode, toStep } from "../router.js";

const PLACES = { text: "answer", prompt: "given", error: "error", task: "task" };
const AT_ONCE = 100;

export function SearchView({ run, query }) {
  const [state, setState] = useState({ matches: [], next: 0, searched: 0, of: 0, error: "", wanted: AT_ONCE });
  const text = query.text || "";
  useEffect(() => setState({ matches: [], next: 0, searched: 0, of: 0, error: "", wanted: AT_ONCE }), [text, run]);
  useEffect(() => {
    if (!text || state.next === null || state.matches.length >= state.wanted || state.error) return undefined;
    const stop = new AbortController();
    ask(question(runPath(run, "search"), { text, after: state.next || "" }), stop.signal)
      .then((data) => setState((before) => ({ ...before, matches: [...before.matches, ...data.matches], next: data.next, searched: data.searched, of: data.of })))
      .catch((error) => stop.signal.aborted || setState((before) => ({ ...before, error: error.message })));
    return () => stop.abort();
  }, [text, run, state.next, state.wanted, state.error]);
  useRowKeys("tr[data-match]");
  if (!text) return html`<${Empty}>Write into the search field above what to find in prompts, answers and errors of recorded episodes.<//>`;
  const more = state.next !== null;
  return html`<h1>Search <span class="dim">for “${text}”: ${plural(state.matches.length, "place")}${more ? " so far" : ""} in ${plural(state.of, "recorded episode")}</span></h1>
    ${state.error && html`<${Empty}>${state.error}<//>`}
    <div class="scroll" role="group" aria-label="table" tabindex="0"><table><tbody>${state.matches.map(
      (match, index) => html`<tr key=${index} data-match><td><a href=${toEpisode(run, match.episode, { turn: match.turn, find: text })}>${match.trajectory || match.episode}</a></td><td class="num">${match.step ? html`<a href=${toStep(run, match.step)}>step ${match.step}</a>` : ""}</td>
        <td class="dim">${match.turn === null || match.turn === undefined ? "" : `turn ${match.turn + 1}, `}${PLACES[match.where] || match.where}</td><td class="mono wrap"><span class="dim">${match.before}</span><mark class="found">${match.match}</mark><span class="dim">${match.after}</span></td></tr>`,
    )}</tbody></table></div>
    ${!more && state.matches.length === 0 && !state.error && html`<${Empty}>Nothing is found. Only recorded episodes are searched.<//>`}
    ${more && state.matches.length >= state.wanted && html`<button type="button" onClick=${() => setState({ ...state, wanted: state.wanted + AT_ONCE })}>Search on</button>`}`;
}
