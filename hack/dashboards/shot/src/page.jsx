// page.jsx: one dashboard as Grafana lays it out. `window.drawn` is a promise of what was drawn: for each panel its title, the
// number of its series, and its error; picture.mjs waits for it.
import { Component, useEffect } from 'react';
import { createRoot } from 'react-dom/client';
import { CoreApp, EventBusSrv, ThemeContext, createTheme, dateTime, rangeUtil } from '@grafana/data';
import { GlobalStyles, Icon, PanelChrome, PanelContextProvider, Text } from '@grafana/ui';
import { prepare } from './fields.mjs';
import { DRAWINGS } from './panels.jsx';
import { anyOf, interpolate, intervals, labelValues, panelFrames, samples } from './prometheus.mjs';

const [CELL, GAP, COLUMNS, MARGIN] = [30, 8, 24, 16];

// The place of a panel on the grid, in pixels.
function place({ x, y, w, h }, width) {
  const column = (width - GAP * (COLUMNS - 1)) / COLUMNS;
  return {
    left: x * (column + GAP), top: y * (CELL + GAP), width: w * column + (w - 1) * GAP, height: h * CELL + (h - 1) * GAP,
  };
}

const variables = (board) => board.templating.list.filter(({ type }) => type !== 'datasource');

// The values of the dashboard's variables: what "All" stands for. The list of their choices shows whether they work.
async function chooseAll(board) {
  const values = {};
  const errors = [];
  for (const { name, type, query, allValue } of variables(board)) {
    if (type !== 'query') throw new Error(`variable ${name} is not a query`);
    const choices = await labelValues(query.query, values);
    if (choices.length === 0) errors.push({ title: `variable ${name}`, series: 0 });
    values[name] = allValue ?? anyOf(choices);
  }
  return { values, errors };
}

// The step of annotations in seconds, which is for hours: shorter if only some minutes are shown.
const shortestStep = (range, step) => Math.min(
  rangeUtil.intervalToSeconds(step), Math.ceil((range.to.valueOf() - range.from.valueOf()) / 1000 / 60),
);

// The times at which the series of the dashboard's annotations begin.
async function annotate(board, { range, scrapeSeconds, values }) {
  const found = board.annotations.list.filter(({ enable, expr }) => enable && expr).map(async ({ expr, iconColor, step: shortest }) => {
    const { step, variables: durations } = intervals(range, 1600, scrapeSeconds, shortestStep(range, shortest));
    const series = await samples(interpolate(expr, { ...values, ...durations }), range, step);
    return series.flatMap(({ times }) => times
      .filter((time, index) => time - (times[index - 1] ?? 0) > step * 1000)
      .map((time) => ({ time, color: iconColor })));
  });
  return (await Promise.all(found)).flat();
}

class Boundary extends Component {
  state = { error: null };

  static getDerivedStateFromError(error) {
    return { error };
  }

  componentDidCatch(error) {
    this.props.onError(error);
  }

  render() {
    return this.state.error ? <Notice>{this.state.error.message}</Notice> : this.props.children;
  }
}

const Notice = ({ children }) => (
  <div style={{ height: '100%', display: 'grid', placeItems: 'center', opacity: 0.6 }}>{children}</div>
);

const context = { eventsScope: 'board', eventBus: new EventBusSrv(), app: CoreApp.Dashboard };

function Panel({ shown, onError }) {
  const { panel, box, prepared, error } = shown;
  const Drawing = DRAWINGS[panel.type];
  const padding = panel.type === 'table' ? 'none' : 'md';
  return (
    <div style={{ position: 'absolute', left: box.left, top: box.top }}>
      <PanelChrome title={panel.title} description={panel.description} width={box.width} height={box.height} padding={padding}>
        {(width, height) => {
          if (error) return <Notice>{error}</Notice>;
          if (prepared.series.length === 0) return <Notice>No data</Notice>;
          return <Boundary onError={onError}><Drawing {...prepared} width={width} height={height} /></Boundary>;
        }}
      </PanelChrome>
    </div>
  );
}

const RowTitle = ({ shown: { panel, box } }) => (
  <div style={{ position: 'absolute', ...box, display: 'flex', alignItems: 'center', gap: 8 }}>
    <Icon name="angle-down" />
    <Text element="h2" variant="h5">{panel.title}</Text>
  </div>
);

function Chip({ theme, label, children }) {
  const border = `1px solid ${theme.components.input.borderColor}`;
  const part = { border, padding: '5px 8px', fontSize: 12 };
  return (
    <span style={{ display: 'inline-flex' }}>
      {label && <span style={{ ...part, borderRight: 'none', background: theme.colors.background.secondary, fontWeight: 500 }}>{label}</span>}
      <span style={{ ...part, background: theme.components.input.background, minWidth: 60 }}>{children}</span>
    </span>
  );
}

function Head({ board, theme, range }) {
  const format = 'YYYY-MM-DD HH:mm';
  return (
    <div style={{ display: 'flex', alignItems: 'center', gap: 12, height: 56 }}>
      <Text element="h1" variant="h4">{board.title}</Text>
      {variables(board).map(({ name, label }) => <Chip key={name} theme={theme} label={label ?? name}>All</Chip>)}
      <span style={{ flex: 1 }} />
      <Text color="secondary" variant="bodySmall">Drawn with Grafana’s UI library {window.settings.version}</Text>
      <Chip theme={theme}>{range.from.format(format)} to {range.to.format(format)} UTC</Chip>
    </div>
  );
}

function Board({ board, theme, range, shown, onReady, onError }) {
  useEffect(onReady, []);
  const height = Math.max(...shown.map(({ box }) => box.top + box.height));
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <PanelContextProvider value={context}>
        <div style={{ padding: `0 ${MARGIN}px ${MARGIN}px`, background: theme.colors.background.canvas }}>
          <Head board={board} theme={theme} range={range} />
          <div style={{ position: 'relative', height }}>
            {shown.map((one) => (one.panel.type === 'row'
              ? <RowTitle key={one.panel.id} shown={one} />
              : <Panel key={one.panel.id} shown={one} onError={(error) => onError(one, error)} />))}
          </div>
        </div>
      </PanelContextProvider>
    </ThemeContext.Provider>
  );
}

async function load(panel, { width, theme, annotations, ...request }) {
  const box = place(panel.gridPos, width);
  if (panel.type === 'row') {
    if (panel.collapsed) throw new Error(`row ${panel.title} is collapsed, which cannot be drawn yet`);
    return { panel, box };
  }
  try {
    const frames = await panelFrames(panel, { ...request, width: box.width });
    const timeZone = 'utc';
    const prepared = await prepare(panel, frames, theme, timeZone);
    return { panel, box, prepared: { ...prepared, annotations, range: request.range, timeZone } };
  } catch (error) {
    return { panel, box, error: error.message };
  }
}

async function draw() {
  const { board, minutes, scrapeSeconds } = window.settings;
  const theme = createTheme({ colors: { mode: 'dark' } });
  const to = dateTime(Date.now()).utc();
  const from = dateTime(to.valueOf() - minutes * 60_000).utc();
  const range = { from, to, raw: { from: `now-${minutes}m`, to: 'now' } };
  const { values, errors } = await chooseAll(board);
  const request = { range, scrapeSeconds, values };
  const annotations = await annotate(board, request);
  await Promise.all([400, 500].map((weight) => document.fonts.load(`${weight} 12px Inter`)));
  const width = window.innerWidth - 2 * MARGIN;
  const shown = await Promise.all(board.panels.map((panel) => load(panel, { ...request, width, theme, annotations })));
  await new Promise((ready) => {
    createRoot(document.getElementById('board')).render(
      <Board
        board={board} theme={theme} range={range} shown={shown} onReady={ready}
        onError={(one, error) => { one.error = error.message; }}
      />,
    );
  });
  await document.fonts.ready;
  const panels = shown.filter(({ panel }) => panel.type !== 'row').map(({ panel: { title, type }, prepared, error }) => (
    { title, type, series: prepared?.series.length ?? 0, error }
  ));
  return [...errors, ...panels];
}

window.drawn = document.fonts.load('400 12px Inter').catch(() => {}).then(draw);
