// Weights of the form's own machine: they go to the server while the form is filled in, and their
// name there into the field beside.

import { size } from 'formats'
import { root } from 'root'

/** Return why a file is rejected, or nothing. @param {{name: string, size: number}} file @param {number} most */
export const objection = (file, most) => {
  if (!/\.(safetensors|pt)$/.test(file.name)) return `${file.name} is not a weights file; allowed: .safetensors or .pt.`
  if (!file.size) return `${file.name} is empty.`
  if (file.size > most) return `${file.name} has ${size(file.size)}; allowed: at most ${size(most)}.`
  return ''
}

/** @param {Found} box @param {Found} input what the server calls it */
const createUpload = (box, input) => {
  const [bar, stop, message] = [
    box.querySelector('progress'),
    box.querySelector('[data-stop]'),
    box.querySelector('[data-message]'),
  ]
  /** @type {XMLHttpRequest | null} */
  let request = null
  /** @param {string} text */
  const over = (text) => {
    request = null
    bar.hidden = stop.hidden = true
    message.textContent = text
  }
  /** @param {File} file */
  const send = (file) => {
    const sent = new XMLHttpRequest() // fetch reports no progress
    request = sent
    sent.open('PUT', `${root}/api/v1/uploads/${encodeURIComponent(file.name)}`)
    sent.setRequestHeader('X-CSRF-Token', document.querySelector('meta[name=csrf-token]').content)
    sent.setRequestHeader('Content-Type', 'application/octet-stream')
    sent.responseType = 'json'
    sent.upload.addEventListener('progress', ({ loaded }) => {
      bar.value = String(loaded / file.size)
    })
    sent.addEventListener('load', () => {
      if (sent.status !== 201) return over(sent.response?.detail ?? `The server responded with status ${sent.status}.`)
      input.value = sent.response.upload
      input.dispatchEvent(new Event('input', { bubbles: true }))
      return over(`${file.name} is uploaded: ${size(file.size)}, SHA-256 ${sent.response.sha256}.`)
    })
    sent.addEventListener('error', () =>
      over(`${file.name} was not uploaded: the connection was lost, and nothing was stored.`),
    )
    sent.addEventListener('abort', () => over(`${file.name} was stopped; nothing was stored.`))
    sent.send(file)
    bar.value = '0'
    bar.hidden = stop.hidden = false
    message.textContent = `Uploading ${file.name}, ${size(file.size)}.`
  }
  box.querySelector('[data-file]').addEventListener('change', (/** @type {any} */ { target }) => {
    request?.abort()
    input.value = ''
    const [file] = target.files
    if (!file) return
    const text = objection(file, Number(box.dataset.upload))
    if (text) message.textContent = text
    else send(file)
  })
  stop.addEventListener('click', () => request?.abort())
  // A run that starts meanwhile would start without them.
  box.closest('form').addEventListener('submit', (/** @type {Event} */ event) => {
    if (!request) return
    event.preventDefault()
    message.textContent = 'The file is still being uploaded: wait for it, or stop the upload.'
    box.closest('details').open = true
    box.scrollIntoView({ block: 'center' })
  })
  box.hidden = false
}

const found = /** @type {Found} */ (globalThis.document?.querySelector('[data-upload]'))
if (found) createUpload(found, found.closest('.field').querySelector('input'))
