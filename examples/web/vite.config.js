// The page, the npm package `qsample-onnx` from its sources, and ONNX Runtime's WebAssembly → qsample/assets/web.
import { fileURLToPath } from "node:url";
import { defineConfig } from "vite";
import { dependencies } from "./package.json" with { type: "json" };

const path = (name) => fileURLToPath(new URL(name, import.meta.url));

export default defineConfig({
  base: "./",
  // The package's own dependencies are those of the page: a build needs no installation in js/.
  resolve: { alias: { "qsample-onnx": path("../../js/src/web.ts") }, dedupe: Object.keys(dependencies) },
  worker: { format: "es" },
  build: { outDir: path("../../qsample/assets/web"), emptyOutDir: true, target: "es2022", modulePreload: false, chunkSizeWarningLimit: 2000 },
});
