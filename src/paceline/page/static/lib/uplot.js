// Loads uPlot when the first chart is drawn: the list of runs needs none.

let loading = null;

export function loadUplot() {
  loading ??= new Promise((resolve, reject) => {
    const style = document.createElement("link");
    style.rel = "stylesheet";
    style.href = "vendor/uPlot.min.css";
    document.head.prepend(style); // the page's own rules come later, and so apply
    const script = document.createElement("script");
    script.src = "vendor/uPlot.min.js";
    script.addEventListener("load", () => resolve(window.uPlot));
    script.addEventListener("error", () => {
      loading = null;
      reject(new Error("the charts could not be loaded"));
    });
    document.head.append(script);
  });
  return loading;
}
