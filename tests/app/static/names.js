// What the import map is to a browser: bare names are the modules of app/static.
import { existsSync } from 'node:fs'
import { registerHooks } from 'node:module'

registerHooks({
  resolve: (name, context, next) => {
    const url = new URL(`../../../app/static/${name}.js`, import.meta.url)
    return existsSync(url) ? { url: url.href, format: 'module', shortCircuit: true } : next(name, context)
  },
})
