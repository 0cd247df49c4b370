// Images in Markdown: chosen, pasted or dropped into a text field, which gets their Markdown.
import { size as sizeText } from 'formats'
import { root } from 'root'

/** The server's limit. */
const MOST_BYTES = 4 << 20
const TYPES = ['image/png', 'image/jpeg', 'image/gif', 'image/webp']

/** Why a file is not sent; empty: it is. @param {{name: string, type: string, size: number}} file */
export const rejection = ({ name, type, size }) => {
  if (!TYPES.includes(type)) return `${name}: ${type || 'unknown type'}; allowed: PNG, JPEG, GIF or WebP.`
  if (size > MOST_BYTES) return `${name}: ${sizeText(size)}; allowed: at most ${sizeText(MOST_BYTES)}.`
  return ''
}
/** The Markdown of an image. @param {string} name of the file @param {string} address */
export const markdownOf = (name, address) => `![${name.replace(/\.\w+$/, '').replace(/[[\]\\]/g, '')}](${address})`

/** @param {string} path of the run, report or project @param {File} file @returns {Promise<string>} its Markdown */
const send = async (path, file) => {
  const problem = rejection(file)
  if (problem) throw new Error(problem)
  const answer = await fetch(`${root}/api/v1${path.replace(/\?|$/, '/images$&')}`, {
    method: 'POST',
    headers: { 'X-CSRF-Token': document.querySelector('meta[name=csrf-token]').content, 'Content-Type': file.type },
    body: file,
  })
  const { address, detail } = await answer.json()
  if (!answer.ok) throw new Error(`${file.name}: ${detail}`)
  return markdownOf(file.name, address)
}

/** Replace the selection by a text; Ctrl+Z undoes it. @param {HTMLTextAreaElement} area @param {string} text */
const insert = (area, text) => {
  area.focus()
  if (!document.execCommand('insertText', false, text))
    area.setRangeText(text, area.selectionStart, area.selectionEnd, 'end')
}

/** @param {Found} area whose data-images is the path of a run, report or project */
export const acceptImages = (area) => {
  const picker = Object.assign(document.createElement('input'), {
    type: 'file',
    accept: TYPES.join(),
    multiple: true,
    hidden: true,
  })
  const button = Object.assign(document.createElement('button'), {
    type: 'button',
    className: 'small',
    textContent: 'Add image',
  })
  const note = Object.assign(document.createElement('span'), { className: 'quiet' })
  note.setAttribute('role', 'status')
  note.textContent = 'or paste or drop one'
  const line = Object.assign(document.createElement('p'), { className: 'inline image-upload' })
  line.append(button, picker, note)
  area.after(line)

  /** @param {FileList|File[]} files */
  const take = async (files) => {
    note.className = 'quiet'
    for (const file of files) {
      note.textContent = `${file.name}…`
      try {
        insert(/** @type {any} */ (area), (await send(area.dataset.images, file)) + '\n')
        note.textContent = 'or paste or drop one'
      } catch (error) {
        note.className = 'error'
        note.textContent =
          error instanceof TypeError ? 'The server does not answer.' : /** @type {Error} */ (error).message
      }
    }
  }
  button.addEventListener('click', () => picker.click())
  picker.addEventListener('change', () => {
    take([...(picker.files ?? [])])
    picker.value = ''
  })
  area.addEventListener('paste', (/** @type {any} */ event) => {
    const files = [...event.clipboardData.files]
    if (!files.length) return
    event.preventDefault()
    take(files)
  })
  area.addEventListener('dragover', (/** @type {any} */ event) => {
    if ([...event.dataTransfer.types].includes('Files')) event.preventDefault()
  })
  area.addEventListener('drop', (/** @type {any} */ event) => {
    const files = [...event.dataTransfer.files]
    if (!files.length) return
    event.preventDefault()
    take(files)
  })
}
for (const area of document.querySelectorAll('textarea[data-images]')) acceptImages(area)
