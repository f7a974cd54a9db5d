// A server of packages and of this package's bundle, and a Chromium that opens pages there.
import { existsSync, createReadStream, mkdtempSync, statSync } from "node:fs";
import { createServer, type Server } from "node:http";
import { tmpdir } from "node:os";
import { extname, join, normalize } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";
import { type Browser, chromium, type Page } from "playwright-core";

const ROOT = fileURLToPath(new URL("../..", import.meta.url));
const TYPES: Record<string, string> = { ".html": "text/html", ".js": "text/javascript", ".mjs": "text/javascript", ".wasm": "application/wasm", ".json": "application/json" };
const PLACES = ["/usr/bin/chromium-headless-shell", "/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];
export const executable = process.env.QSAMPLE_CHROMIUM ?? PLACES.find((path) => existsSync(path));
// WebGPU without a GPU: over SwiftShader, which Chromium brings along.
const ARGUMENTS = [
  "--no-sandbox", "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan,WebGPUService", "--ignore-gpu-blocklist",
];

const PAGE = '<!doctype html><title>qsample</title><script type="module">globalThis.qsample = await import("/js/web.js")</script>';

/** What a test may do to the files of a package. */
export type Tamper = (path: string) => { status?: number; body?: Uint8Array; cut?: number } | undefined;

export class Harness {
  tamper: Tamper = () => undefined;
  requests: string[] = [];
  private constructor(private readonly server: Server, readonly browser: Browser, readonly address: string) {}

  static async start(packages: Record<string, string>): Promise<Harness> {
    const folder = mkdtempSync(join(tmpdir(), "qsample-js-"));
    await build({
      entryPoints: [join(ROOT, "src/web.ts"), join(ROOT, "src/worker.ts")],
      bundle: true, format: "esm", splitting: true, target: "es2022", outdir: folder, logLevel: "error",
    });
    const roots: Record<string, string> = { js: folder, ort: join(ROOT, "node_modules/onnxruntime-web/dist"), ...packages };
    let harness: Harness | undefined;
    const server = createServer((request, response) => {
      const [, first, ...rest] = normalize(decodeURIComponent(new URL(request.url!, "http://x").pathname)).split("/");
      const headers = { "cross-origin-opener-policy": "same-origin", "cross-origin-embedder-policy": "require-corp", "cache-control": "no-store" };
      if (!first) {
        response.writeHead(200, { ...headers, "content-type": "text/html" }).end(PAGE);
        return;
      }
      const file = join(roots[first] ?? "/nowhere", rest.join("/"));
      if (first in packages) harness?.requests.push(rest.join("/"));
      const change = harness?.tamper(`${first}/${rest.join("/")}`);
      if (change?.status || !existsSync(file) || !statSync(file).isFile()) {
        response.writeHead(change?.status ?? 404, headers).end();
        return;
      }
      const size = statSync(file).size;
      response.writeHead(200, { ...headers, "content-type": TYPES[extname(file)] ?? "application/octet-stream", ...(change?.body ? {} : { "content-length": size }) });
      if (change?.body) response.end(change.body);
      else if (change?.cut !== undefined) createReadStream(file, { end: change.cut }).on("end", () => response.destroy()).pipe(response, { end: false });
      else createReadStream(file).pipe(response);
    });
    await new Promise<void>((done) => server.listen(0, "127.0.0.1", done));
    const browser = await chromium.launch({ executablePath: executable, headless: true, args: ARGUMENTS });
    const { port } = server.address() as { port: number };
    harness = new Harness(server, browser, `http://127.0.0.1:${port}`);
    return harness;
  }

  /** A page whose variable `qsample` is the package. */
  async page(): Promise<Page> {
    const page = await (await this.browser.newContext()).newPage();
    if (process.env.VERBOSE) page.on("console", (message) => console.log(message.text().slice(0, 1000)));
    await page.goto(this.address);
    await page.waitForFunction(() => "qsample" in globalThis);
    return page;
  }

  async stop(): Promise<void> {
    await this.browser.close();
    this.server.close();
  }
}
