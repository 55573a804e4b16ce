// The theme, set before anything is painted: the one that was chosen last, or the system's. main.js has its switch.
"use strict";
{
  let kept = null;
  try {
    kept = localStorage.getItem("graphpp-theme");
  } catch { /* a browser that keeps nothing for files */ }
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = ["light", "dark"].includes(kept) ? kept : dark ? "dark" : "light";
}
