// browser.mjs: Debian's Chromium without a window, driven by its DevTools protocol.
import { spawn } from 'node:child_process';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';

const CHROMIUM = 'chromium-headless-shell';
const PATIENCE = 60_000;

const within = (promise, what) => {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error(`${what} took more than ${PATIENCE / 1000} s`)), PATIENCE);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
};

// The address of the protocol, which the browser prints when it is ready.
function debuggerOf(process) {
  return new Promise((found, reject) => {
    process.on('error', () => reject(new Error(`${CHROMIUM} cannot be started: run 'hack/packages.sh browser' as root`)));
    process.on('exit', (code) => reject(new Error(`${CHROMIUM} ended at once, with ${code}`)));
    createInterface({ input: process.stderr }).on('line', (line) => {
      const [, url] = /^DevTools listening on (.+)$/.exec(line) ?? [];
      if (url) found(url);
    });
  });
}

export class Browser {
  #sent = 0;
  #waiting = new Map();

  // The WebSocket class is a parameter because packages are not found from this file.
  static async start(WebSocket) {
    const browser = new Browser();
    browser.profile = await mkdtemp(join(tmpdir(), 'agentloop-shot-'));
    // A group of its own: the program is a script, and ending that alone would leave the browser.
    browser.process = spawn(CHROMIUM, [
      '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--hide-scrollbars', '--remote-debugging-port=0',
      `--user-data-dir=${browser.profile}`,
    ], { detached: true, stdio: ['ignore', 'ignore', 'pipe'] });
    process.once('exit', () => browser.kill());
    const url = await within(debuggerOf(browser.process), `the start of ${CHROMIUM}`);
    browser.socket = new WebSocket(url, { maxPayload: 256 << 20 });
    await within(new Promise((open, reject) => browser.socket.on('open', open).on('error', reject)), 'a connection to the browser');
    browser.socket.on('message', (text) => browser.#receive(JSON.parse(text)));
    const { targetId } = await browser.command('Target.createTarget', { url: 'about:blank' });
    browser.session = (await browser.command('Target.attachToTarget', { targetId, flatten: true })).sessionId;
    await browser.command('Page.enable');
    await browser.command('Runtime.enable');
    return browser;
  }

  #receive({ id, result, error, method, params }) {
    if (method === 'Runtime.exceptionThrown') this.onException?.(params.exceptionDetails);
    const waiting = this.#waiting.get(id);
    if (!waiting) return;
    this.#waiting.delete(id);
    if (error) waiting.reject(new Error(`${waiting.method}: ${error.message}`));
    else waiting.answer(result);
  }

  command(method, params = {}) {
    const id = ++this.#sent;
    const answered = new Promise((answer, reject) => this.#waiting.set(id, { method, answer, reject }));
    this.socket.send(JSON.stringify({ id, method, params, sessionId: this.session }));
    return within(answered, method);
  }

  // Loads a page of this size and waits until its scripts have run.
  async open(url, width, height) {
    await this.command('Emulation.setDeviceMetricsOverride', { width, height, deviceScaleFactor: 1, mobile: false });
    const { errorText } = await this.command('Page.navigate', { url });
    if (errorText) throw new Error(`${url}: ${errorText}`);
    await this.value(`new Promise((done) => (document.readyState === 'complete' && location.href !== 'about:blank'
      ? done(1) : addEventListener('load', () => done(1))))`);
  }

  // The value of an expression in the page, once its promise is kept.
  async value(expression) {
    const { result, exceptionDetails } = await this.command('Runtime.evaluate', { expression, awaitPromise: true, returnByValue: true });
    if (exceptionDetails) throw new Error(exceptionDetails.exception?.description ?? exceptionDetails.text);
    return result.value;
  }

  async screenshot() {
    const { data } = await this.command('Page.captureScreenshot', { format: 'png' });
    return Buffer.from(data, 'base64');
  }

  kill() {
    try {
      process.kill(-this.process.pid, 'SIGKILL');
    } catch {
      // It has ended.
    }
  }

  async stop() {
    const ended = new Promise((done) => this.process.once('close', done));
    // It ends its own children, or else all of them are ended.
    this.session = undefined;
    await this.command('Browser.close').catch(() => {});
    const late = setTimeout(() => this.kill(), 5_000);
    await ended;
    clearTimeout(late);
    await rm(this.profile, { recursive: true, force: true, maxRetries: 5 });
  }
}
