import { defineConfig } from "vitest/config";

const of = (name: string, include: string[]) => ({ test: { name, include, testTimeout: 120_000, hookTimeout: 120_000 } });

// "node" takes seconds; "browser" needs a Chromium, and takes minutes.
export default defineConfig({
  test: { projects: [of("node", ["test/*.test.ts"]), of("browser", ["test/browser/*.test.ts"])] },
});
