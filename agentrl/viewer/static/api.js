// Questions to the server; in a page that was saved as one file the answers lie in the page, and nothing is asked.
import { useEffect, useState } from "./html.js";

const kept = document.getElementById("answers");
const answers = kept ? JSON.parse(kept.textContent) : null;
export const saved = answers !== null;

export const runPath = (run, ...rest) => ["api/run", ...[run, ...rest].map((part) => encodeURIComponent(part))].join("/");

export function question(path, query = {}) {
  const set = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const words = set.sort(([one], [other]) => (one < other ? -1 : 1)).map(([name, value]) => `${name}=${encodeURIComponent(value)}`);
  return words.length ? `${path}?${words.join("&")}` : path;
}

// The answer to an address that `question` made; an Error with the server's own words if there is none.
export async function ask(where, signal) {
  if (saved) {
    const answer = answers[where] ?? answers[where.split("?")[0]];
    if (answer === undefined) throw new Error("This file holds only a part of the run. Open the run itself with `agentrl view` to see this.");
    return answer;
  }
  const response = await fetch(where, { signal, headers: { Accept: "application/json" } });
  const body = await response.json().catch(() => null);
  if (!response.ok) throw new Error((body && body.error) || `The server answered ${response.status} to ${where}.`);
  return body;
}

// An image of a saved page; only data of images is taken.
export function savedImage(where) {
  const found = answers && answers[where];
  return typeof found === "string" && found.startsWith("data:image/") ? found : "";
}

const revisions = new Map();

// Data of an address. With `live`, it is asked again whenever the run named so has grown; the old answer stays until then.
export function useData(where, live = "") {
  const revision = useRevision(live);
  const [state, setState] = useState({ where: null, data: null, error: null });
  useEffect(() => {
    if (!where) return undefined;
    const stop = new AbortController();
    ask(where, stop.signal)
      .then((data) => setState({ where, data, error: null }))
      .catch((error) => stop.signal.aborted || setState((before) => ({ where, data: before.where === where ? before.data : null, error: error.message })));
    return () => stop.abort();
  }, [where, revision]);
  return state.where === where && where ? state : { where, data: null, error: null };
}

function useRevision(name) {
  const [revision, setRevision] = useState(revisions.get(name) || "");
  useEffect(() => {
    const follow = () => setRevision(revisions.get(name) || "");
    follow();
    addEventListener("grown", follow);
    return () => removeEventListener("grown", follow);
  }, [name]);
  return name ? revision : "";
}

// Ask once a second whether a run, or with `""` any of the folder, has grown. Returns the last answer, and whether the server is there.
export function useGrowth(run) {
  const [state, setState] = useState({ changes: null, lost: false });
  useEffect(() => {
    if (saved) return undefined;
    let timer = 0;
    const stop = new AbortController();
    const look = async () => {
      let wait_ms = 3000;
      try {
        const changes = await ask(run ? runPath(run, "changes") : "api/changes", stop.signal);
        const name = run || "runs";
        if (revisions.get(name) !== changes.version) {
          revisions.set(name, changes.version);
          dispatchEvent(new Event("grown"));
        }
        setState({ changes, lost: false });
        if (!run || changes.status === "running" || (changes.index && !changes.index.done)) wait_ms = 1000;
      } catch {
        if (!stop.signal.aborted) setState((before) => ({ ...before, lost: true }));
      }
      if (!stop.signal.aborted) timer = setTimeout(look, document.hidden ? 5000 : wait_ms);
    };
    look();
    return () => {
      clearTimeout(timer);
      stop.abort();
    };
  }, [run]);
  return state;
}
