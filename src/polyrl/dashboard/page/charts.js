// Line charts with uPlot, in the page's colours.

import uPlot from "./uPlot.js";
import { number } from "./dom.js";

export const COLOURS = ["#3a86c8", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#8c6bb1", "#56b4e9", "#c9b400"];

const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap((one) => [one, 2 * one, 5 * one]); // there is no half of a step

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const dataOf = (x, lines) => [x, ...lines.map((line) => line.values)];

/** Draw lines over a common x. `lines`: [{label, values}]. Returns {close, update}: the same lines may grow, and what was zoomed to stays. */
export function lineChart(element, xLabel, x, lines, { height = 200, legend = true } = {}) {
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  const chart = new uPlot({
    width: Math.max(200, element.clientWidth), height,
    scales: { x: { time: false } },
    legend: { show: legend },
    cursor: { y: false, points: { size: 5 } },
    axes: [{ ...axis, size: 30, incrs: xLabel === "step" ? WHOLE : undefined, label: xLabel, labelSize: 16, labelFont: "11px system-ui" }, { ...axis, size: 54, values: (_, ticks) => ticks.map((one) => number(one)) }],
    series: [
      { label: xLabel, value: (_, value) => number(value, 5) },
      ...lines.map((line, place) => ({
        label: line.label, stroke: COLOURS[place % COLOURS.length], width: 1.5, spanGaps: true,
        points: { show: (chart, at) => chart.data[at].filter((one) => one !== null).length < 40, size: 4 }, value: (_, value) => number(value, 4),
      })),
    ],
  }, dataOf(x, lines), element);
  const resize = new ResizeObserver(() => chart.setSize({ width: Math.max(200, element.clientWidth), height }));
  resize.observe(element);
  function update(x, lines) {
    const before = chart.data[0], { min, max } = chart.scales.x, isZoomed = min > before[0] || max < before.at(-1);
    chart.setData(dataOf(x, lines), !isZoomed);
    if (isZoomed) chart.setScale("x", { min, max });
  }
  return { update, close: () => { resize.disconnect(); chart.destroy(); } };
}
