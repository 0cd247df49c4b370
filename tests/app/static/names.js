// What the import map is to a browser: bare names are the modules of app/static.
import { globSync } from 'node:fs'
import { registerHooks } from 'node:module'
import { pathToFileURL } from 'node:url'

registerHooks({
  resolve: (name, context, next) => {
    const [path] = globSync(`app/static/*/${name}.js`)
    return path ? { url: pathToFileURL(path).href, format: 'module', shortCircuit: true } : next(name, context)
  },
})
