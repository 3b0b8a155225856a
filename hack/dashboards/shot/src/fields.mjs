// fields.mjs: what Grafana adds to the settings of fields: the defaults of each type of panel, overrides, transformations.
// Only what the dashboards use; everything else is an error, so that no setting is left out silently.
import { lastValueFrom } from 'rxjs';
import {
  FieldType, Registry, applyFieldOverrides, cacheFieldDisplayNames, getPanelOptionsWithDefaults, identityOverrideProcessor, standardTransformers,
  standardTransformersRegistry, transformDataFrame,
} from '@grafana/data';

const always = () => true;
const ofNumbers = (field) => field.type === FieldType.number;
const property = (id, shouldApply) => ({ id, path: id, name: id, process: identityOverrideProcessor, shouldApply });
const STANDARD = [
  property('unit', always), property('min', ofNumbers), property('max', ofNumbers), property('color', always),
  property('thresholds', always), property('mappings', (field) => field.type !== FieldType.time),
];
// Grafana's own for a field without thresholds.
const THRESHOLDS = { mode: 'absolute', steps: [{ value: -Infinity, color: 'green' }, { value: 80, color: 'red' }] };

// For each type of panel: its defaults of options and fields.
const TYPES = {
  stat: { fields: {}, options: { percentChangeColorMode: 'standard', wideLayout: true } },
  bargauge: {
    fields: {},
    options: { namePlacement: 'auto', minVizWidth: 8, minVizHeight: 16, maxVizHeight: 300, sizing: 'auto' },
  },
  table: { fields: { custom: { align: 'auto', inspect: false } }, options: { cellHeight: 'sm' } },
  timeseries: {
    fields: {
      color: { mode: 'palette-classic' },
      custom: {
        drawStyle: 'line', lineInterpolation: 'linear', lineWidth: 1, fillOpacity: 0, gradientMode: 'none',
        showPoints: 'auto', pointSize: 5, spanNulls: false, axisPlacement: 'auto', axisGridShow: true,
        axisCenteredZero: false, axisBorderShow: false, stacking: { mode: 'none', group: 'A' },
      },
    },
    options: {},
  },
  'state-timeline': {
    fields: { color: { mode: 'continuous-GrYlRd' }, custom: { fillOpacity: 70, lineWidth: 0, spanNulls: false } },
    options: {},
  },
};

// Transformations that a dashboard may use.
const TRANSFORMATIONS = { merge: standardTransformers.mergeTransformer, organize: standardTransformers.organizeFieldsTransformer };
standardTransformersRegistry.setInit(() => Object.entries(TRANSFORMATIONS).map(([id, transformation]) => (
  { id, name: id, transformation: () => Promise.resolve(transformation), editor: null }
)));

function plugin(type) {
  const known = TYPES[type];
  if (!known) {
    throw new Error(`panels of type ${type} cannot be drawn yet: add it to hack/dashboards/shot/src/fields.mjs and panels.jsx`);
  }
  const custom = Object.keys(known.fields.custom ?? {}).map((name) => (
    { ...property(`custom.${name}`, always), path: name, isCustom: true }
  ));
  return {
    defaults: known.options,
    fieldConfigDefaults: { defaults: { thresholds: THRESHOLDS, mappings: [], ...known.fields }, overrides: [] },
    fieldConfigRegistry: new Registry(() => [...STANDARD, ...custom]),
  };
}

function rejectUnknown({ fieldConfigRegistry: registry }, { defaults, overrides }) {
  const { custom = {}, ...standard } = defaults;
  const names = [...Object.keys(standard), ...Object.keys(custom).map((name) => `custom.${name}`)];
  const overridden = overrides.flatMap(({ properties }) => properties.map(({ id }) => id));
  const unknown = [...names, ...overridden].filter((name) => !registry.getIfExists(name));
  if (unknown.length > 0) throw new Error(`settings that are not drawn yet: ${unknown} (hack/dashboards/shot/src/fields.mjs)`);
  const matchers = overrides.map(({ matcher }) => matcher.id).filter((id) => id !== 'byName');
  if (matchers.length > 0) throw new Error(`overrides are not found yet by ${matchers}`);
}

// The options of a panel, and its frames as its drawing needs them.
export async function prepare(panel, frames, theme, timeZone) {
  const type = plugin(panel.type);
  rejectUnknown(type, panel.fieldConfig);
  const unknown = (panel.transformations ?? []).filter(({ id }) => !(id in TRANSFORMATIONS));
  if (unknown.length > 0) throw new Error(`transformations that are not known yet: ${unknown.map(({ id }) => id)}`);
  const { options, fieldConfig } = getPanelOptionsWithDefaults({
    plugin: type, currentOptions: panel.options, currentFieldConfig: structuredClone(panel.fieldConfig), isAfterPluginChange: false,
  });
  const transformed = await lastValueFrom(transformDataFrame(panel.transformations ?? [], frames, { interpolate: (text) => text }));
  const series = applyFieldOverrides({
    data: transformed, fieldConfig, fieldConfigRegistry: type.fieldConfigRegistry, replaceVariables: (text) => text, theme, timeZone,
  });
  cacheFieldDisplayNames(series);
  return { options, fieldConfig, series };
}
