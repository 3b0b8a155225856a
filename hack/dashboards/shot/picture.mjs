// picture.mjs: takes pictures of dashboards. It bundles the page, serves it beside a proxy to Prometheus on loopback, opens each
// dashboard in Chromium, and fails if a panel cannot be drawn. shot.sh calls it.
//
//   PROMETHEUS_URL=http://127.0.0.1:9090 NODE_ENV_DIR=... node picture.mjs OUT_DIR NAME=BOARD.json...
import { readFileSync } from 'node:fs';
import { mkdir, readFile, unlink, writeFile } from 'node:fs/promises';
import { createServer } from 'node:http';
import { createRequire } from 'node:module';
import { dirname, join, normalize } from 'node:path';
import { fileURLToPath } from 'node:url';
import { execFileSync } from 'node:child_process';
import { Browser } from './browser.mjs';

const HERE = dirname(fileURLToPath(import.meta.url));
const { PROMETHEUS_URL, NODE_ENV_DIR, SHOT_MINUTES = '15', SCRAPE_SECONDS = '15' } = process.env;
const MODULES = join(NODE_ENV_DIR, 'node_modules');
const packages = createRequire(`${MODULES}/`);
const WIDTH = 1600;
const LARGEST = 250_000;

async function bundle() {
  const { outputFiles } = await packages('esbuild').build({
    entryPoints: [join(HERE, 'src/page.jsx')], bundle: true, write: false, outdir: '/', format: 'iife', jsx: 'automatic', minify: true,
    nodePaths: [MODULES], define: { 'process.env.NODE_ENV': '"production"', 'process.env': '{}', global: 'window' },
    loader: { '.woff': 'empty', '.woff2': 'empty', '.ttf': 'empty', '.svg': 'empty', '.png': 'empty' }, logLevel: 'error',
  });
  return Object.fromEntries(outputFiles.map(({ path, contents }) => [path, contents]));
}

// The library asks for its fonts and icons where Grafana has them.
function asset(path) {
  if (/^\/public\/fonts\/inter\//.test(path)) {
    return readFileSync(join(MODULES, '@fontsource-variable/inter/files/inter-latin-wght-normal.woff2'));
  }
  const [, icon] = /^\/public\/build\/img\/icons\/([\w/-]+\.svg)$/.exec(path) ?? [];
  return icon && readFileSync(join(MODULES, '@grafana/ui/dist/public/img/icons', normalize(icon)));
}

const TYPES = { js: 'text/javascript', css: 'text/css', svg: 'image/svg+xml', woff2: 'font/woff2' };

const html = (settings) => `<!doctype html><meta charset="utf-8"><title>${settings.board.title}</title>
<link rel="stylesheet" href="/page.css"><script>window.settings = ${JSON.stringify(settings).replaceAll('<', '\\u003c')}</script>
<body><div id="board"></div><script src="/page.js"></script></body>`;

async function forward(request, response) {
  const chunks = [];
  for await (const chunk of request) chunks.push(chunk);
  const answer = await fetch(new URL(request.url.slice(1), `${PROMETHEUS_URL.replace(/\/+$/, '')}/`), {
    method: request.method, body: Buffer.concat(chunks), headers: { 'content-type': request.headers['content-type'] },
  }).catch((error) => new Response(`Prometheus at ${PROMETHEUS_URL} cannot be reached: ${error.cause?.message ?? error.message}`, { status: 502 }));
  response.writeHead(answer.status, { 'content-type': 'application/json' });
  response.end(await answer.text());
}

async function serve(files, boards) {
  const version = packages('@grafana/ui/package.json').version;
  const shared = { version, minutes: Number(SHOT_MINUTES), scrapeSeconds: Number(SCRAPE_SECONDS) };
  const server = createServer((request, response) => {
    const { pathname } = new URL(request.url, 'http://page');
    if (pathname.startsWith('/api/v1/')) return forward(request, response);
    const board = boards[pathname.slice(1)];
    if (board) {
      response.writeHead(200, { 'content-type': 'text/html' });
      return response.end(html({ board, ...shared }));
    }
    let body = files[pathname];
    try {
      body ??= asset(pathname);
    } catch {
      // There is no such icon.
    }
    response.writeHead(body ? 200 : 404, { 'content-type': TYPES[pathname.split('.').pop()] ?? 'text/plain' });
    response.end(body);
  });
  await new Promise((listening) => server.listen(0, '127.0.0.1', listening));
  return server;
}

async function compress(path, png) {
  const raw = `${path}.raw`;
  await writeFile(raw, png);
  execFileSync('pngquant', ['--force', '--strip', '--speed', '1', '--output', path, '256', raw]);
  await unlink(raw);
  return (await readFile(path)).length;
}

async function take(browser, url, path) {
  await browser.open(url, WIDTH, 1000);
  const panels = await browser.value('window.drawn');
  const height = await browser.value('Math.ceil(document.getElementById("board").getBoundingClientRect().height)');
  await browser.command('Emulation.setDeviceMetricsOverride', { width: WIDTH, height, deviceScaleFactor: 1, mobile: false });
  // Two frames later, what has been drawn is on the screen.
  await browser.value('new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(() => done(1), 500))))');
  return { panels, size: await compress(path, await browser.screenshot()), height };
}

// Ends with what to do if there is nothing to draw.
async function checkPrometheus() {
  const url = new URL('api/v1/query?query=agentloop_build_info', `${PROMETHEUS_URL.replace(/\/+$/, '')}/`);
  const answer = await fetch(url, { signal: AbortSignal.timeout(10_000) }).then((response) => response.json()).catch((error) => {
    throw new Error(`no Prometheus answers at ${PROMETHEUS_URL} (${error.cause?.code ?? error.message}): set PROMETHEUS_URL to one that does`);
  });
  if (answer.data?.result?.length === 0) {
    throw new Error(`Prometheus at ${PROMETHEUS_URL} has no series of agentloop: scrape the controller as docs/tasks/monitoring.md says`);
  }
}

async function main([out, ...pairs]) {
  await checkPrometheus();
  const boards = Object.fromEntries(await Promise.all(pairs.map(async (pair) => {
    const [name, file] = pair.split('=');
    return [name, JSON.parse(await readFile(file, 'utf8'))];
  })));
  await mkdir(out, { recursive: true });
  const server = await serve(await bundle(), boards);
  const browser = await Browser.start(packages('ws'));
  const failures = [];
  try {
    for (const name of Object.keys(boards)) {
      browser.onException = ({ exception, text }) => failures.push(`${name}: the page: ${exception?.description ?? text}`);
      const path = join(out, `${name}.png`);
      const { panels, size, height } = await take(browser, `http://127.0.0.1:${server.address().port}/${name}`, path);
      const empty = panels.filter(({ error, series }) => !error && series === 0).map(({ title }) => title);
      console.log(`${path}: ${WIDTH} x ${height}, ${Math.round(size / 1000)} kB, ${panels.length - empty.length} of ${panels.length} panels with data`);
      if (empty.length > 0) console.log(`  without data: ${empty.join(', ')}`);
      failures.push(...panels.filter(({ error }) => error).map(({ title, error }) => `${name}: ${title}: ${error}`));
      if (size > LARGEST) failures.push(`${path} has ${size} bytes, more than ${LARGEST}: choose a shorter time with SHOT_MINUTES`);
      if (empty.length === panels.length) failures.push(`${name}: no panel has data; does Prometheus at ${PROMETHEUS_URL} scrape agentloop?`);
    }
  } finally {
    await browser.stop();
    server.close();
    server.closeAllConnections();
  }
  for (const failure of failures) console.error(`error: ${failure}`);
  process.exitCode = failures.length > 0 ? 1 : 0;
}

await main(process.argv.slice(2)).catch((error) => {
  console.error(`error: ${error.message.split('\n')[0].replace(/^Error: /, '')}`);
  process.exitCode = 1;
});
