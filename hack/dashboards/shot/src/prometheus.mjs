// prometheus.mjs: asks Prometheus what a panel asks, as Grafana's data source does, and makes Grafana's data frames of the
// answers. It draws nothing.
import { FieldType, createDataFrame, rangeUtil } from '@grafana/data';

// Replaces a dashboard's variables by the text that Grafana would send. `values` holds those of the dashboard's own variables.
export function interpolate(expr, values) {
  const text = expr.replace(/\$(?:(\w+)|\{(\w+)\})/g, (whole, bare, braced) => values[bare ?? braced] ?? whole);
  if (text.includes('$')) throw new Error(`unknown variable in the query: ${text}`);
  return text;
}

// Several values of a variable, as Grafana writes them into a query.
export function anyOf(values) {
  const escaped = values.map((value) => value.replace(/[\\$^*{}[\]'+?.()|]/g, '\\\\$&'));
  return escaped.length === 1 ? escaped[0] : `(${escaped.join('|')})`;
}

// Durations that Grafana computes from the time range, the width of the panel, the scrape interval and the shortest step.
export function intervals(range, width, scrapeSeconds, shortestStep = 0) {
  const { intervalMs } = rangeUtil.calculateInterval(range, Math.max(Math.round(width), 1), `${scrapeSeconds}s`);
  const step = Math.max(intervalMs / 1000, scrapeSeconds, shortestStep);
  const seconds = Math.round((range.to.valueOf() - range.from.valueOf()) / 1000);
  return {
    step,
    variables: {
      __interval: `${step}s`,
      __rate_interval: `${Math.max(step + scrapeSeconds, 4 * scrapeSeconds)}s`,
      __range: `${seconds}s`,
    },
  };
}

async function ask(path, parameters) {
  const response = await fetch(path, { method: 'POST', body: new URLSearchParams(parameters) });
  const text = await response.text();
  let answer;
  try {
    answer = JSON.parse(text);
  } catch {
    throw new Error(`Prometheus answered ${response.status}: ${text.slice(0, 200)}`);
  }
  if (answer.status !== 'success') throw new Error(`Prometheus: ${answer.error} (query: ${parameters.query})`);
  return answer.data;
}

// The values of a variable `label_values(series, label)`.
export async function labelValues(query, values) {
  const [, series, label] = /^label_values\((.+), (\w+)\)$/.exec(query) ?? [];
  if (!series) throw new Error(`a variable's query is not label_values(series, label): ${query}`);
  const found = await ask('/api/v1/series', { 'match[]': interpolate(series, values), ...times() });
  return [...new Set(found.map((labels) => labels[label]).filter(Boolean))].sort();
}

// Series are looked for within this time before now.
const times = () => ({ start: Date.now() / 1000 - 3600, end: Date.now() / 1000 });

const number = (text) => ({ '+Inf': Infinity, '-Inf': -Infinity })[text] ?? Number(text);

const legend = (format, labels) => format.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label) => labels[label] ?? '');

const seriesName = (labels) => {
  const { __name__: name = '', ...rest } = labels;
  const pairs = Object.entries(rest).map(([label, value]) => `${label}="${value}"`);
  return pairs.length > 0 ? `${name}{${pairs.join(', ')}}` : name;
};

// The samples of a query over the range: start and end are multiples of the step, so that they stay where they are.
export async function samples(expr, range, step) {
  const aligned = (time) => Math.floor(time.valueOf() / 1000 / step) * step;
  const { result } = await ask('/api/v1/query_range', {
    query: expr, start: aligned(range.from), end: aligned(range.to), step,
  });
  return result.map(({ metric, values }) => ({
    labels: metric,
    times: values.map(([time]) => time * 1000),
    values: values.map(([, value]) => number(value)),
  }));
}

// Leaves out the shortest step of the query, which is for installations of which Grafana does not know how often they are scraped.
async function rangeFrames(target, expr, range, step) {
  const series = await samples(expr, range, step);
  return series.map(({ labels, times, values }) => createDataFrame({
    refId: target.refId,
    fields: [
      { name: 'Time', type: FieldType.time, values: times, config: { interval: step * 1000 } },
      {
        name: 'Value',
        type: FieldType.number,
        // What is not a number is a gap.
        values: values.map((value) => (Number.isFinite(value) ? value : null)),
        labels,
        config: { displayNameFromDS: legend(target.legendFormat, labels) || seriesName(labels) },
      },
    ],
  }));
}

// One frame of one value for each series: what a number or a bar shows.
async function instantFrames(target, expr, range) {
  const { result } = await ask('/api/v1/query', { query: expr, time: range.to.valueOf() / 1000 });
  return result.map(({ metric, value: [time, value] }) => createDataFrame({
    refId: target.refId,
    fields: [
      { name: 'Time', type: FieldType.time, values: [time * 1000], config: {} },
      {
        name: 'Value',
        type: FieldType.number,
        values: [Number.isFinite(number(value)) ? number(value) : null],
        labels: metric,
        config: { displayNameFromDS: legend(target.legendFormat, metric) || seriesName(metric) },
      },
    ],
  }));
}

// One frame with a column for each label, as Grafana makes it of a query with format "table".
async function tableFrames(target, expr, range, severalQueries) {
  const { result } = await ask('/api/v1/query', { query: expr, time: range.to.valueOf() / 1000 });
  if (result.length === 0) return [];
  const labels = [...new Set(result.flatMap(({ metric }) => Object.keys(metric)))].sort();
  return [createDataFrame({
    refId: target.refId,
    fields: [
      { name: 'Time', type: FieldType.time, values: result.map(({ value }) => value[0] * 1000), config: {} },
      ...labels.map((label) => ({
        name: label, type: FieldType.string, values: result.map(({ metric }) => metric[label] ?? ''), config: {},
      })),
      {
        name: severalQueries ? `Value #${target.refId}` : 'Value',
        type: FieldType.number,
        values: result.map(({ value }) => number(value[1])),
        config: {},
      },
    ],
  })];
}

// All frames of a panel.
export async function panelFrames(panel, { range, width, scrapeSeconds, values }) {
  const { step, variables } = intervals(range, width, scrapeSeconds);
  const frames = panel.targets.map((target) => {
    const expr = interpolate(target.expr, { ...values, ...variables });
    if (target.format === 'table' && target.instant) return tableFrames(target, expr, range, panel.targets.length > 1);
    if (!target.format && target.instant) return instantFrames(target, expr, range);
    if (!target.format) return rangeFrames(target, expr, range, step);
    throw new Error(`query ${target.refId} has the format ${target.format}, but is no table of the last values`);
  });
  return (await Promise.all(frames)).flat();
}
