import { defineConfig } from "tsup";

// Plain ES modules: an application's bundler, or Node, resolves ONNX Runtime and the tokenizer.
export default defineConfig({
  entry: ["src/web.ts", "src/node.ts", "src/worker.ts"],
  format: "esm",
  target: "es2022",
  dts: { entry: "src/web.ts" },
  splitting: true,
  clean: true,
  external: ["onnxruntime-node"],
});
