// Light or dark: as the system says, until the reader chooses; the choice is kept in the browser.
import { useEffect, useState } from "./html.js";

const NAME = "agentrl-theme";
const system = matchMedia("(prefers-color-scheme: dark)");

function chosen() {
  try {
    return localStorage.getItem(NAME) || "";
  } catch {
    return ""; // a page from disk may be refused storage
  }
}

export const isDark = () => (document.documentElement.dataset.theme || (system.matches ? "dark" : "light")) === "dark";

export function setTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  try {
    localStorage.setItem(NAME, name);
  } catch {
    // the choice then holds for this page only
  }
  dispatchEvent(new Event("theme"));
}

export function useDark() {
  const [dark, setDark] = useState(isDark());
  useEffect(() => {
    const follow = () => setDark(isDark());
    addEventListener("theme", follow);
    system.addEventListener("change", follow);
    return () => {
      removeEventListener("theme", follow);
      system.removeEventListener("change", follow);
    };
  }, []);
  return dark;
}

setTheme(chosen());
