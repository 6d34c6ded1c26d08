// Runs before the first paint, so the page never flashes in the other theme.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("paceline-theme");
  } catch {
    // Storage may be disabled; the theme of the system applies.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
